"""The recipes for clusters and the command they call: what can be known of them without a cluster."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from telic.cli import main

RECIPES = Path(__file__).resolve().parents[3] / "recipes" / "cluster"
SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())


def manifest() -> dict[str, Any]:
    """Give the objects of the manifest by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())}


def check(part: dict[str, Any]) -> None:
    """Hold one object against the schema of its kind."""
    jsonschema.validate(part, {**SCHEMA, "$ref": f"#/$defs/{part['kind']}"}, jsonschema.Draft202012Validator)


def test_the_kubernetes_manifest_fits_its_schema() -> None:
    """Catches a misspelt field, which the cluster refuses or, worse, drops, and a value it has no meaning for."""
    found = manifest()
    assert sorted(found) == ["Job", "Role", "RoleBinding", "Service", "ServiceAccount"]
    for part in found.values():
        check(part)


@pytest.mark.parametrize(
    ("kind", "spoil", "says"),
    [
        ("Job", lambda job: job["spec"].update(backOffLimit=3), "backOffLimit"),
        ("Job", lambda job: job["spec"].update(parallelism="4"), "'4' is not of type 'integer'"),
        ("Job", lambda job: job["spec"].pop("completions"), "'completions' is a required property"),
        ("Job", lambda job: job["spec"]["template"]["spec"].update(restartPolicy="OnFailure"), "'Never' was expected"),
        ("Job", lambda job: job["spec"]["template"]["spec"]["containers"][0].update(command="telic"), "'telic' is not"),
        (
            "Job",
            lambda job: job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[0]),
            "0 should not be valid",
        ),
        ("Service", lambda service: service["spec"].pop("selector"), "'selector' is a required property"),
        ("Role", lambda role: role["rules"][0].update(verbs=["read"]), "'read' is not one of"),
        ("RoleBinding", lambda binding: binding["roleRef"].pop("apiGroup"), "'apiGroup' is a required property"),
        ("ServiceAccount", lambda account: account["metadata"].update(name="Train"), "'Train' does not match"),
    ],
)
def test_a_manifest_with_a_typing_error_does_not_fit(kind: str, spoil: Callable[[Any], Any], says: str) -> None:
    """Catches a schema that lets everything through."""
    part = copy.deepcopy(manifest()[kind])
    spoil(part)
    with pytest.raises(jsonschema.ValidationError) as caught:
        check(part)
    assert says in caught.value.message


def test_the_kubernetes_manifest_is_what_jax_asks_the_cluster_for() -> None:
    """Catches a job whose pods cannot find each other: JAX looks at the job, its pods and its headless service."""
    found = manifest()
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


ORPHAN = """
import os, signal, sys
from telic.cli import rank
listening, speaking = os.pipe()
os.close(listening)
signal.signal(signal.SIGTERM, lambda *_: sys.stderr.write("saved\\n"))
rank.ORPHAN_SECONDS = 0.2
rank._beat(speaking)
"""


def test_a_process_whose_launcher_is_gone_saves_and_ends() -> None:
    """Catches processes that train on for ever when `telic launch` was killed: nobody else can end them."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143, done.stderr
    assert "the launcher of this process is gone" in done.stderr
    assert "saved" in done.stderr
