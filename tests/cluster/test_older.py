"""A run on a real cluster that an older version of Paceline has submitted: this version reads, stops and deletes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import older_version
from support.people import IMAGE, Person, eventually
from support.saving_on_a_cluster import TRAINING

pytestmark = pytest.mark.timeout(900, func_only=True)


def read_json(person: Person, *arguments: str, **env: str) -> Any:
    done = person.call(*arguments, "-o", "json", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_of_an_older_version_is_read_stopped_and_deleted(person: Person, tmp_path: Path) -> None:
    older = older_version.unpack(tmp_path / "older")
    settings: dict[str, Any] = {"image": IMAGE, "image_pull_policy": "IfNotPresent"}
    settings["volumes"] = [{"mount": "/shared", "claim": "shared"}]
    job = person.job(TRAINING, workers=2, kubernetes=settings, snapshots={"to": "claim://shared/kept"})
    submitted = person.call("run", str(job), "--on", "kubernetes", "--detach", PYTHONPATH=str(older))
    assert submitted.returncode == 0, submitted.stderr
    run = submitted.stdout.strip()

    waited = person.call("wait", run, "--for", "snapshot=10", "--timeout", "4m")
    assert waited.returncode == 0, waited.stderr
    status = read_json(person, "status", run)
    assert (status["status"], status["generations"]) == ("running", 1) and status["steps"] >= 10
    assert "problems" not in status
    printed = person.call("logs", run).stdout.splitlines()
    assert {"worker-0 | start 0", "worker-1 | start 0"} <= set(printed), printed
    assert read_json(person, "snapshots", "ls", run)[0]["step"] >= 10
    elsewhere = read_json(person, "status", run, "--on", "kubernetes", PACELINE_HOME=str(tmp_path / "elsewhere"))
    assert (elsewhere["status"], elsewhere["generations"], elsewhere["restarts"]) == ("running", 1, [])

    too_old = f"error: {run} was started by an older version of Paceline, which cannot"
    for verb, action in {"stacks": "show what tasks are doing", "pause": "pause and resume runs"}.items():
        refused = person.call(verb, run)
        assert refused.returncode == 1 and f"{too_old} {action}; stop it with" in refused.stderr, refused.stderr

    stopped = person.call("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    status = read_json(person, "status", run)
    assert (status["status"], status["reason"], status["restarts"]) == ("stopped", "stopped by `paceline stop`", [])
    deleted = person.call("delete", "--yes", "--snapshots", run)
    assert deleted.returncode == 0 and not (person.shared / "kept" / run).exists(), deleted.stderr
    kinds = "jobs,pods,services,configmaps,secrets,networkpolicies"
    selected = [kinds, "-n", person.namespace, "-l", f"paceline.dev/run={run}"]
    eventually("an empty namespace", lambda: not person.cluster.get(*selected)["items"])
