"""The recipes for clusters and the command they call: what can be known of them without a cluster."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from telic.cli import main

RECIPES = Path(__file__).resolve().parents[3] / "recipes" / "cluster"


def test_the_kubernetes_manifest_is_what_jax_asks_the_cluster_for() -> None:
    """Catches a job whose pods cannot find each other: JAX looks at the job, its pods and its headless service."""
    found: dict[str, Any] = {}
    for part in yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()):
        assert {"apiVersion", "kind", "metadata"} <= part.keys()
        found[part["kind"]] = part
    job, pod = found["Job"]["spec"], found["Job"]["spec"]["template"]["spec"]
    name = found["Job"]["metadata"]["name"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    assert pod["restartPolicy"] == "Never", "a pod policy on exit codes needs it"
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert found["Service"]["spec"]["selector"] == {"job-name": name}
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["RoleBinding"]["subjects"][0]["name"] == pod["serviceAccountName"]
    allowed = {resource: rule["verbs"] for rule in found["Role"]["rules"] for resource in rule["resources"]}
    assert allowed == {"pods": ["get", "list"], "services": ["get", "list"], "jobs": ["get", "list"]}
    (container,) = pod["containers"]
    assert container["command"] == ["telic", "launch", "train.py"]
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    on = {rule["action"]: rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"]}
    assert on == {"FailJob": [2], "Ignore": [143]}


def test_the_slurm_script_is_a_script() -> None:
    """Catches a typing error that shows only after hours in a queue."""
    path = RECIPES / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text()
    assert "#SBATCH --signal=TERM@" in text, "the run saves when it is told that its time is up"
    assert "srun --kill-on-bad-exit=1 telic launch train.py" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.py"], "nothing.py is no file"),
        (["{here}", "--processes", "0"], "--processes must be at least 1"),
        (["{here}", "--processes", "2", "--devices", "-1"], "--devices must be at least 1"),
        (["{here}", "--devices", "4"], "--processes starts"),
    ],
)
def test_a_wrong_call_of_launch_is_answered_at_once(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches processes that are started before it is known that they cannot run."""
    assert main(["launch", *(a.format(here=__file__) for a in arguments)]) == 2
    assert says in capsys.readouterr().err
