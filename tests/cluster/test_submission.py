"""A submission that is cut short at any of its requests to the cluster, interrupted, or made twice."""

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

pytestmark = pytest.mark.timeout(300, func_only=True)

# The command line, with a signal to itself before or after one of its requests; all of them are noted in a file.
CUT_SHORT = """
import os, runpy, sys
import httpx2

number, when, at, notes = sys.argv[1:5]
send, calls = httpx2.Client.send, []


def watched(client, request, **options):
    calls.append(request)
    with open(notes, "a") as file:
        print(request.method, request.url.path, file=file)
    if when == "before" and len(calls) == int(at):
        os.kill(os.getpid(), int(number))
    answer = send(client, request, **options)
    if when == "after" and len(calls) == int(at):
        os.kill(os.getpid(), int(number))
    return answer


httpx2.Client.send = watched
sys.argv[1:] = sys.argv[5:]
runpy.run_module("paceline.cli", run_name="__main__", alter_sys=True)
"""
KINDS = "jobs,pods,services,configmaps,secrets,networkpolicies,deployments"


def submit(
    person: Person, run: str, job: Path, kill: int = 0, when: str = "", at: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Detached; with the requests that were made. Without a signal: a whole submission."""
    notes = person.folder / f"{run}.requests"
    words = [sys.executable, "-c", CUT_SHORT, str(kill), when, str(at), str(notes)]
    words += ["run", str(job), "--on", "kubernetes", "--detach", "--run", run]
    done = subprocess.run(words, env=person.env, cwd=person.folder, capture_output=True, text=True, timeout=120)
    return done, notes.read_text().splitlines() if notes.exists() else []


def objects(person: Person, run: str) -> list[str]:
    found = person.cluster.get(KINDS, "-n", person.namespace, "-l", f"paceline.dev/run={run}")["items"]
    return sorted(f"{each['kind']} {each['metadata']['name']}" for each in found)


def pods(person: Person, run: str) -> dict[str, str]:
    """With their phases."""
    found = person.cluster.get("pods", "-n", person.namespace, "-l", f"paceline.dev/run={run}")["items"]
    return {each["metadata"]["name"]: each["status"]["phase"] for each in found}


def held(person: Person, run: str) -> list[str]:
    """Pods that take something of the cluster."""
    return [name for name, phase in pods(person, run).items() if phase in ("Pending", "Running")]


def _has_two_pods(person: Person, run: str) -> bool:
    return len(pods(person, run)) == 2


def statuses(person: Person) -> dict[str, str]:
    listed = person.call("ls", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    return {report["run"]: report["status"] for report in json.loads(listed.stdout)}


def test_a_command_line_killed_at_any_request_leaves_nothing_that_runs_or_stays(person: Person) -> None:
    job = person.job(workers=2, limits={"start": "8s", "grace": "1s"})
    whole, requests = submit(person, "whole", job)
    assert whole.returncode == 0, whole.stderr
    paths = [request.split("/")[-1] for request in requests]
    assert paths[0] == "jobs" and requests[-1].startswith("PATCH") and paths[-1] == "whole"

    # To the cluster it is all the same whether the answer was read, or the next request not sent.
    cuts = {"before-01": ("before", 1), **{f"after-{at:02}": ("after", at) for at in range(1, len(requests) + 1)}}
    *unfinished, last = cuts
    cuts["at-once"] = cuts[unfinished[-1]]

    def cut(run: str) -> None:
        killed, made = submit(person, run, job, signal.SIGKILL, *cuts[run])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(made) == cuts[run][1]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cut, cuts))

    # The members of this one are released and its captain is not: they are the most that such a run may cost.
    released = unfinished[-1]
    for run in (released, "at-once"):
        eventually(f"members of {run}", partial(_has_two_pods, person, run))
    deleted = person.call("delete", "--yes", "at-once")
    assert deleted.returncode == 0, deleted.stderr
    eventually("nothing of it", lambda: not objects(person, "at-once"))
    shown = statuses(person)
    assert {run: shown[run] for run in unfinished} == dict.fromkeys(unfinished, "abandoned")
    assert shown["whole"] != "abandoned" and shown[last] != "abandoned"  # the cluster has all of it, and runs it
    eventually("they leave", lambda: not held(person, released))
    assert {run: held(person, run) for run in unfinished} == {run: [] for run in unfinished}
    assert set(pods(person, released).values()) == {"Succeeded"}

    deleted = person.call("delete", "--yes", "--force", "whole", *unfinished, last)
    assert deleted.returncode == 0, deleted.stderr
    left = [KINDS, "-n", person.namespace, "-l", "app.kubernetes.io/managed-by=paceline"]
    eventually("nothing", lambda: not person.cluster.get(*left)["items"], more=lambda: str(person.cluster.get(*left)))
    assert statuses(person) == {}


def test_ctrl_c_at_any_request_of_a_submission_leaves_nothing(person: Person) -> None:
    job = person.job(workers=1)

    def interrupt(at: int) -> None:
        run = f"cut-{at}"
        cut, made = submit(person, run, job, signal.SIGINT, "before", at)
        assert cut.returncode == 130, f"{made}\n{cut.stderr}"
        assert cut.stderr.splitlines()[-1] == f"interrupted: {run} was not started"
        assert len(made) == at + 1 and made[-1].startswith("DELETE"), made

    creates, releases = (1, 5, 8), (9, 10)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(interrupt, (*creates, *releases)))
    left = [KINDS, "-n", person.namespace, "-l", "app.kubernetes.io/managed-by=paceline"]
    eventually("nothing", lambda: not person.cluster.get(*left)["items"], more=lambda: str(person.cluster.get(*left)))
    assert statuses(person) == {}


def test_a_run_id_is_taken_once(person: Person, start: Callable[..., Run], tmp_path: Path) -> None:
    first = start("--run", "taken", workers=1)
    first.wait("step")
    before = objects(person, "taken")
    again: dict[str, Any] = {}
    for home in (person.home, tmp_path / "another"):
        person.env["PACELINE_HOME"] = str(home)
        again[home.name], requests = submit(person, "taken", person.job(workers=1))
        assert again[home.name].returncode == 2
        assert "DELETE" not in "".join(requests)
    errors = {name: done.stderr.splitlines()[-1] for name, done in again.items()}
    assert errors["home"].startswith("error: there is a run taken already; `paceline delete taken` removes it")
    assert errors["another"].startswith(f"error: there is a run taken in {person.namespace} already")
    assert objects(person, "taken") == before
    assert not (tmp_path / "another" / "runs" / "taken").exists()
    person.finish()
    assert first.ends() == 0, first.said()
