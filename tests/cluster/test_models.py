"""A run on a cluster, tried and exported on the machine of the person: from its captain's pod, and from a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.people import Person, Run

pytestmark = pytest.mark.timeout(300, func_only=True)

# Saves one snapshot of two parts, and goes on until it is told to finish.
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


def models(person: Person, run: str, *words: str) -> list[Any]:
    """What try prints and what export writes."""
    done = person.call("try", run, *words, "--", "a b")
    assert done.returncode == 0, done.stderr
    to = person.folder / f"model-{run.rpartition('/')[2]}-{len(words)}"
    exported = person.call("export", run, *words, "--to", str(to))
    assert exported.returncode == 0, exported.stderr
    about = json.loads((to / "paceline.json").read_text())
    return [json.loads(done.stdout), json.loads((to / "model.pt2").read_text()), about["run"], about["step"]]


def fields(person: Person, **more: Any) -> dict[str, Any]:
    program = ["python3", "train.py"]
    return {
        "program": PROGRAM, "workers": 2, "env": {"COLOUR": "blue"}, "command": [*program, "train"],
        "try": {"command": [*program, "try"]}, "export": {"command": [*program, "export"]}, **more,
    }  # fmt: skip


def test_from_the_captains_pod_while_the_run_trains(person: Person, start: Callable[..., Run]) -> None:
    run = start(**fields(person))
    run.wait("committed", step=5)
    assert models(person, run.name) == [[PARTS, ["a b"], run.name, "blue"], PARTS, run.name, 5]
    person.finish()
    assert run.ends() == 0, run.said()


def test_from_a_bucket_when_the_run_is_over_and_from_another_machine(
    person: Person, start: Callable[..., Run], bucket: dict[str, str], outside: dict[str, str]
) -> None:
    settings = json.loads(person.job(PROGRAM).read_text())["kubernetes"]
    more = {"to": "s3://digits/training"}
    kubernetes = {**settings, "env_from": [{"secret": "store"}]}
    run = start(**fields(person, snapshots=more, kubernetes=kubernetes))
    run.wait("committed", step=5)
    person.finish()
    assert run.ends() == 0, run.said()
    person.env = {**person.env, **outside}
    wanted = [[PARTS, ["a b"], run.name, "blue"], PARTS, run.name, 5]
    assert models(person, run.name) == wanted
    person.env = {**person.env, "PACELINE_HOME": str(person.folder / "another")}
    where = f"s3://digits/training/{run.name}"
    refused = person.call("try", where)
    assert refused.returncode == 2 and "was not started from this machine" in refused.stderr
    assert models(person, where, "--job", str(person.folder / "work" / "job.yaml")) == wanted
