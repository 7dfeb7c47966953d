"""The tests that take long, by measurement: ``python -m tests.slow times.xml`` writes them into tests/slow.txt.

``pytest -m "not endurance" --junitxml=times.xml`` measures them; the machine should be idle. Those of the list are
marked `slow` by tests/conftest.py: they run last in CI, and not with a plain ``pytest``, which should end within a
quarter of an hour on two cores.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
SECONDS = 3.0

ALWAYS = frozenset(
    {
        "tests/test_import.py",
        "tests/test_exports.py",
        "tests/test_layers.py",
        "tests/resume/test_killed.py",
        "tests/docs/test_pages.py::test_readme_programs_run_and_learn",
    }
)
"""What a plain ``pytest`` runs however long it takes: modules, and single tests."""


def listed() -> frozenset[str]:
    """Give the ids of the tests in the list."""
    return frozenset(line for line in FILE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")


def found(report: Path, seconds: float) -> list[str]:
    """Give the ids of the tests of a report that took longer than some seconds."""
    ids: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase"):
        module = Path(*case.get("classname", "").split(".")).with_suffix(".py").as_posix()
        test = f"{module}::{case.get('name')}"
        if float(case.get("time", 0)) > seconds and ALWAYS.isdisjoint((module, test)):
            ids.add(test)
    return sorted(ids)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what --junitxml wrote")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="a test that takes longer is slow")
    asked = parser.parse_args()
    ids = found(asked.report, asked.seconds)
    head = f"# Took more than {asked.seconds:g} s when measured; written by python -m tests.slow.\n"
    FILE.write_text(head + "".join(f"{line}\n" for line in ids), encoding="utf-8")
    print(f"{len(ids)} tests take more than {asked.seconds:g} s")
