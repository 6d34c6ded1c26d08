"""`paceline pause` on a real cluster: the pods of members end and come back, the captain's stays."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from support.people import IMAGE, Person, Run, eventually
from support.saving_on_a_cluster import TRAINING

pytestmark = pytest.mark.timeout(900, func_only=True)


def job_of(**more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"image": IMAGE, "image_pull_policy": "IfNotPresent"}
    settings["volumes"] = [{"mount": "/shared", "claim": "shared"}]
    program = TRAINING.replace("len(parts) == world and ", "").replace("step % 10 == 0", "paceline.should_save()")
    return {"program": program, "kubernetes": settings, "snapshots": {"to": "claim://shared/kept"}, **more}


def deadlines(run: Run, *names: str) -> list[tuple[bool, int]]:
    """Of these Jobs: whether it is suspended, and its deadline; 0: none."""
    specs = [run.person.cluster.get("job", name, "-n", run.person.namespace)["spec"] for name in names]
    return [(spec["suspend"], spec.get("activeDeadlineSeconds", 0)) for spec in specs]


def test_a_paused_run_gives_its_pods_back_and_continues_later(person: Person, start: Callable[..., Run]) -> None:
    run = start(**job_of(workers=2, limits={"runtime": "1h"}))
    run.wait("step", task="worker-1")
    jobs = run.name, f"{run.name}-worker"
    (_, limit), _ = deadlines(run, *jobs)
    assert limit > 3600
    try:
        paused = person.call("pause", run.name, limit_s=400)  # after 90 s, the tasks are asked for a snapshot again
    except subprocess.TimeoutExpired:
        pytest.fail(f"it was not paused:\n{(run.folder / 'events.jsonl').read_text()[-8000:]}\n{run.said()}")
    assert paused.returncode == 0 and f"{run.name} is paused" in paused.stderr, paused.stderr
    snapshot = run.wait("paused")["snapshot"]
    assert run.pods("worker") == [] and len(run.pods("captain")) == 1
    assert deadlines(run, *jobs) == [(False, 0), (True, limit)]
    status = json.loads(person.call("status", run.name, "-o", "json").stdout)
    assert (status["status"], status["restarts"]) == ("paused", [])
    listed = json.loads(person.call("ls", "--on", "kubernetes", "-o", "json").stdout)
    assert [each["status"] for each in listed if each["run"] == run.name] == ["paused"]
    again = person.call("pause", run.name)
    assert again.returncode == 1 and "is already paused" in again.stderr

    resumed = person.call("resume", run.name)
    assert resumed.returncode == 0 and f"{run.name} continues" in resumed.stderr, resumed.stderr
    (_, later), members = deadlines(run, *jobs)
    assert members == (False, limit) and later >= limit, "the time until now does not count"
    run.wait("step", generation=2, task="worker-1")
    assert run.events("generation-formed")[-1]["restore"] == snapshot
    eventually("both pods run", lambda: len(run.pods("worker")) == 2, more=run.said)
    person.finish()
    assert run.ends() == 0, run.said()
    assert run.report()["restarts"] == [] and not run.events("restart")


def test_a_paused_run_can_be_stopped(person: Person, start: Callable[..., Run]) -> None:
    run = start(**job_of(workers=1))
    run.wait("step")
    paused = person.call("pause", run.name, "--now")
    assert paused.returncode == 0, paused.stderr
    assert person.call("stop", run.name).returncode == 0, run.said()
    run.ends()
    assert run.report()["status"] == "stopped"
