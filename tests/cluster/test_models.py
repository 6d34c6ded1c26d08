"""A run on a cluster, tried and exported on the user's machine: from its captain's pod, and from a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.people import Person, Run

pytestmark = pytest.mark.timeout(900, func_only=True)

# Saves one snapshot of two parts, and continues until it is told to finish.
PROGRAM = """
import json, os, sys, time, pathlib
import paceline
if sys.argv[1] == "train":
    rank, saves = os.environ["PACELINE_RANK"], pathlib.Path(os.environ["PACELINE_SNAPSHOT_DIR"])
    partial = saves / "x.partial"
    partial.mkdir()
    (partial / f"part-{rank}").write_text(f"of {rank}")
    (partial / "paceline.json").write_text(json.dumps({"parts": 2}))
    partial.rename(saves / "step-5")
    paceline.report(step=5)
    while not os.path.exists("/shared/finish"):
        time.sleep(0.05)
    sys.exit()
parts = sorted(path.read_text() for path in pathlib.Path(os.environ["PACELINE_RESTORE"]).glob("part-*"))
if sys.argv[1] == "try":
    print(json.dumps([parts, sys.argv[2:], os.environ["PACELINE_RUN"], os.environ["COLOUR"]]))
else:
    pathlib.Path(os.environ["PACELINE_EXPORT_DIR"], "model.pt2").write_text(json.dumps(parts))
"""
PARTS = ["of 0", "of 1"]


def try_and_export(person: Person, run: str, *arguments: str) -> list[Any]:
    """The output of `try`, and the files that `export` writes."""
    tried = person.call("try", run, *arguments, "--", "a b")
    assert tried.returncode == 0, tried.stderr
    folder = person.folder / f"model-{run.rpartition('/')[2]}-{len(arguments)}"
    exported = person.call("export", run, *arguments, "--to", str(folder))
    assert exported.returncode == 0, exported.stderr
    metadata = json.loads((folder / "paceline.json").read_text())
    return [json.loads(tried.stdout), json.loads((folder / "model.pt2").read_text()), metadata["run"], metadata["step"]]


def fields(person: Person, **more: Any) -> dict[str, Any]:
    program = ["python3", "train.py"]
    return {
        "program": PROGRAM, "workers": 2, "env": {"COLOUR": "blue"}, "command": [*program, "train"],
        "try": {"command": [*program, "try"]}, "export": {"command": [*program, "export"]}, **more,
    }  # fmt: skip


def test_try_and_export_from_the_captains_pod_during_training(person: Person, start: Callable[..., Run]) -> None:
    run = start(**fields(person))
    run.wait("committed", step=5)
    assert try_and_export(person, run.name) == [[PARTS, ["a b"], run.name, "blue"], PARTS, run.name, 5]
    person.finish()
    assert run.ends() == 0, run.said()


def test_try_and_export_from_a_bucket_after_the_run_and_from_another_machine(
    person: Person, start: Callable[..., Run], bucket: dict[str, str], outside: dict[str, str]
) -> None:
    settings = json.loads(person.job(PROGRAM).read_text())["kubernetes"]
    snapshots = {"to": "s3://digits/training"}
    kubernetes = {**settings, "env_from": [{"secret": "store"}]}
    run = start(**fields(person, snapshots=snapshots, kubernetes=kubernetes))
    run.wait("committed", step=5)
    person.finish()
    assert run.ends() == 0, run.said()
    person.env = {**person.env, **outside}
    expected = [[PARTS, ["a b"], run.name, "blue"], PARTS, run.name, 5]
    assert try_and_export(person, run.name) == expected
    person.env = {**person.env, "PACELINE_HOME": str(person.folder / "another")}
    location = f"s3://digits/training/{run.name}"
    refused = person.call("try", location)
    assert refused.returncode == 2 and "is not on this machine" in refused.stderr
    assert try_and_export(person, location, "--job", str(person.folder / "work" / "job.yaml")) == expected
