"""A submission that is killed or interrupted at any of its requests to the cluster, or repeated."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.people import Person, Run, eventually

pytestmark = pytest.mark.timeout(900, func_only=True)

# The command line, which sends itself a signal before or after one of its requests; all are recorded in a file.
SIGNALED = """
import os, runpy, sys, threading
import httpx2

number, when, at, notes = sys.argv[1:5]
send, calls, nested = httpx2.Client.send, [], threading.local()


def recording_send(client, request, **options):
    # A client may send a request through another one, which knows the credentials: it counts once.
    if getattr(nested, "is_sending", False):
        return send(client, request, **options)
    nested.is_sending = True
    try:
        return record_and_send(client, request, **options)
    finally:
        nested.is_sending = False


def record_and_send(client, request, **options):
    calls.append(request)
    with open(notes, "a") as file:
        print(request.method, request.url.path, file=file)
    if when == "before" and len(calls) == int(at):
        os.kill(os.getpid(), int(number))
    answer = send(client, request, **options)
    if when == "after" and len(calls) == int(at):
        os.kill(os.getpid(), int(number))
    return answer


httpx2.Client.send = recording_send
sys.argv[1:] = sys.argv[5:]
runpy.run_module("paceline.cli", run_name="__main__", alter_sys=True)
"""
KINDS = "jobs,pods,services,configmaps,secrets,networkpolicies,deployments"


def submit(
    person: Person, run: str, job: Path, kill: int = 0, when: str = "", at: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Submit, detached; returns the requests, too. Without a signal: a complete submission."""
    notes = person.folder / f"{run}.requests"
    command = [sys.executable, "-c", SIGNALED, str(kill), when, str(at), str(notes)]
    command += ["run", str(job), "--on", "kubernetes", "--detach", "--run", run]
    result = subprocess.run(command, env=person.env, cwd=person.folder, capture_output=True, text=True, timeout=300)
    return result, notes.read_text().splitlines() if notes.exists() else []


def objects(person: Person, run: str) -> list[str]:
    items = person.cluster.get(KINDS, "-n", person.namespace, "-l", f"paceline.dev/run={run}")["items"]
    return sorted(f"{each['kind']} {each['metadata']['name']}" for each in items)


def pods(person: Person, run: str) -> dict[str, str]:
    """Pods of the run: name -> phase."""
    items = person.cluster.get("pods", "-n", person.namespace, "-l", f"paceline.dev/run={run}")["items"]
    return {each["metadata"]["name"]: each["status"]["phase"] for each in items}


def active_pods(person: Person, run: str) -> list[str]:
    """Pods that use resources of the cluster."""
    return [name for name, phase in pods(person, run).items() if phase in ("Pending", "Running")]


def _has_two_pods(person: Person, run: str) -> bool:
    return len(pods(person, run)) == 2


def statuses(person: Person) -> dict[str, str]:
    result = person.call("ls", "-o", "json")
    assert result.returncode == 0, result.stderr
    return {report["run"]: report["status"] for report in json.loads(result.stdout)}


def test_nothing_keeps_running_if_the_command_line_is_killed_at_any_request(person: Person) -> None:
    job = person.job(workers=2, limits={"start": "8s", "grace": "1s"})
    whole, requests = submit(person, "whole", job)
    assert whole.returncode == 0, whole.stderr
    paths = [request.split("/")[-1] for request in requests]
    assert paths[0] == "jobs" and requests[-1].startswith("PATCH") and paths[-1] == "whole"

    # For the cluster, a kill after a response is the same as a kill before the next request.
    cuts = {"before-01": ("before", 1), **{f"after-{at:02}": ("after", at) for at in range(1, len(requests) + 1)}}
    *unfinished, last = cuts
    cuts["at-once"] = cuts[unfinished[-1]]

    def cut(run: str) -> None:
        killed, sent = submit(person, run, job, signal.SIGKILL, *cuts[run])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(sent) == cuts[run][1]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cut, cuts))

    # The members of this one are released and its captain is not: such a run uses the most resources.
    released = unfinished[-1]
    for run in (released, "at-once"):
        eventually(f"members of {run}", partial(_has_two_pods, person, run))
    deleted = person.call("delete", "--yes", "at-once")
    assert deleted.returncode == 0, deleted.stderr
    eventually("its objects are deleted", lambda: not objects(person, "at-once"))
    status_of = statuses(person)
    assert {run: status_of[run] for run in unfinished} == dict.fromkeys(unfinished, "abandoned")
    # The cluster has all objects of these two and runs them.
    assert status_of["whole"] != "abandoned" and status_of[last] != "abandoned"
    eventually("the pods end", lambda: not active_pods(person, released))
    assert {run: active_pods(person, run) for run in unfinished} == {run: [] for run in unfinished}
    assert set(pods(person, released).values()) == {"Succeeded"}

    deleted = person.call("delete", "--yes", "--force", "whole", *unfinished, last)
    assert deleted.returncode == 0, deleted.stderr
    selection = [KINDS, "-n", person.namespace, "-l", "app.kubernetes.io/managed-by=paceline"]
    eventually(
        "no objects",
        lambda: not person.cluster.get(*selection)["items"],
        more=lambda: str(person.cluster.get(*selection)),
    )
    assert statuses(person) == {}


def test_ctrl_c_at_any_request_of_a_submission_leaves_nothing(person: Person) -> None:
    job = person.job(workers=1)

    def interrupt(at: int) -> None:
        run = f"cut-{at}"
        result, sent = submit(person, run, job, signal.SIGINT, "before", at)
        assert result.returncode == 130, f"{sent}\n{result.stderr}"
        assert result.stderr.splitlines()[-1] == f"interrupted: {run} was not started"
        assert len(sent) == at + 1 and sent[-1].startswith("DELETE"), sent

    creates, releases = (1, 5, 8), (9, 10)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(interrupt, (*creates, *releases)))
    selection = [KINDS, "-n", person.namespace, "-l", "app.kubernetes.io/managed-by=paceline"]
    eventually(
        "no objects",
        lambda: not person.cluster.get(*selection)["items"],
        more=lambda: str(person.cluster.get(*selection)),
    )
    assert statuses(person) == {}


def test_a_run_id_can_be_used_only_once(person: Person, start: Callable[..., Run], tmp_path: Path) -> None:
    first = start("--run", "taken", workers=1)
    first.wait("step")
    before = objects(person, "taken")
    results: dict[str, Any] = {}
    for home in (person.home, tmp_path / "another"):
        person.env["PACELINE_HOME"] = str(home)
        results[home.name], requests = submit(person, "taken", person.job(workers=1))
        assert results[home.name].returncode == 2
        assert "DELETE" not in "".join(requests)
    errors = {name: result.stderr.splitlines()[-1] for name, result in results.items()}
    assert errors["home"].startswith("error: run taken already exists; delete it with `paceline delete taken`")
    assert errors["another"].startswith(f"error: a run taken already exists in {person.namespace}")
    assert objects(person, "taken") == before
    assert not (tmp_path / "another" / "runs" / "taken").exists()
    person.finish()
    assert first.ends() == 0, first.said()
