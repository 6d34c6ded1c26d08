"""Kills without end while a program saves all the time: nothing that was committed is lost, nothing is half-loaded."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from runs import PROGRAMS, Event, Run, eventually, job, kill

from paceline.storage.folder import Folder
from paceline.storage.manifest import Id, parse_id
from paceline.storage.snapshots import Snapshots

SEED = 20261115
LIMIT_S = 60.0  # for one recovery, on a machine that has other things to do
HOSTS = ("worker-host-0", "worker-host-1")
TIMES = {"task": 96, "both tasks": 12, "agent": 14, "host": 8, "captain": 15, "captain's host": 4, "all hosts": 1}
# Small ones that are all kept, so that any that is lost is missed; and big ones that are deleted soon.
KEPT = {10_000: 20_000, 3: 5_000_000}  # how many, and of how many bytes


class Told:
    """The events of a run, read on from where they were read before: there are thousands."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.events: list[Event] = []
        self._at = 0

    def read(self) -> list[Event]:
        with (self.run.folder / "events.jsonl").open("rb") as file:
            file.seek(self._at)
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1]
        self._at += len(lines)
        self.events += map(json.loads, lines.splitlines())
        return self.events

    def wait(self, what: str, after: int, wanted: Callable[[Event], bool]) -> Event:
        seen = after

        def check() -> Event | None:
            nonlocal seen
            events = self.read()
            found = next((event for event in events[seen:] if wanted(event)), None)
            over = next((event for event in events[seen:] if event["event"] == "run-ended"), None)
            assert found or over is None, f"the run has ended: {over}\n{self.run.story()}"
            seen = len(events)
            return found

        event = eventually(what, check, LIMIT_S, self.run.story)
        assert event is not None
        return event


class Chaos:
    def __init__(self, run: Run) -> None:
        self.run, self.told = run, Told(run)
        self.generation = 1

    def commits(self, count: int) -> None:
        """So many by the generation that trains now."""
        for _ in range(count):
            after = len(self.told.read())
            self.told.wait("a commit", after, lambda event: event["event"] == "committed")

    def inject(self, fault: str, rank: int) -> None:
        """And all that has to follow from it: somebody trains, and commits."""
        after = len(self.told.read())
        getattr(self, "_" + fault.replace("'", "").replace(" ", "_"))(rank)
        if fault.startswith("captain"):
            self.told.wait("the captain is back", after, lambda event: event["event"] == "captain-returned")
        else:
            formed = self.told.wait(
                f"a generation after {self.generation}", after,
                lambda event: event["event"] == "generation-formed" and event["generation"] > self.generation,
            )  # fmt: skip
            self.generation = formed["generation"]
        self.told.wait(
            f"a commit of generation {self.generation}", after,
            lambda event: event["event"] == "committed" and event["generation"] >= self.generation,
        )  # fmt: skip

    def _task(self, rank: int) -> None:
        kill(self._pid(rank))

    def _both_tasks(self, rank: int) -> None:
        for pid in [self._pid(0), self._pid(1)]:
            kill(pid)

    def _agent(self, rank: int) -> None:
        kill(self.run.agent(HOSTS[rank]))

    def _host(self, rank: int) -> None:
        kill(self.run.keeper(HOSTS[rank]))

    def _captain(self, rank: int) -> None:
        kill(self.run.agent("captain"))

    def _captains_host(self, rank: int) -> None:
        kill(self.run.keeper("captain"))

    def _all_hosts(self, rank: int) -> None:
        for host in ("captain", *HOSTS):
            kill(self.run.keeper(host))

    def _pid(self, rank: int) -> int:
        started = [e for e in self.told.read() if e["event"] == "task-started" and e["task"] == f"worker-{rank}"]
        return int(started[-1]["pid"])


def sequence(keep: int) -> list[tuple[str, int, int]]:
    """What fails, of which rank, and after how many commits."""
    dice = random.Random(f"{SEED} {keep}")
    faults = [fault for fault, times in TIMES.items() for _ in range(times)]
    dice.shuffle(faults)
    return [(fault, dice.randrange(2), dice.randrange(4)) for fault in faults]


def ids(events: list[Event], kind: str, field: str) -> list[Id | None]:
    return [event[field] and parse_id(event[field]) for event in events if event["event"] == kind]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("keep", KEPT)
def test_nothing_that_was_committed_is_lost(keep: int, tmp_path: Path, record_property: Any) -> None:
    state, place = tmp_path / "state", tmp_path / "place"
    state.mkdir()
    program = ["python", str(PROGRAMS / "saves.py"), str(state), "--every", "0.03", "--size", str(KEPT[keep])]
    began = time.monotonic()
    with runs.starter(tmp_path) as start:
        run = start(job(program, snapshots={"to": str(place), "keep": keep}, restart={"limit": 3}))
        run.wait("committed")
        chaos = Chaos(run)
        for fault, rank, commits in sequence(keep):
            chaos.commits(commits)
            chaos.inject(fault, rank)
        (state / "finish").touch()
        report = run.succeeds(LIMIT_S)
        events = chaos.told.read()
        logs = [run.log(task) for task in ("worker-0", "worker-1")]
    seconds = time.monotonic() - began
    snapshots = Snapshots(Folder(str(place)), run.folder.name)
    known = snapshots.known()
    counted = known.counted()
    told = [id for id in ids(events, "committed", "snapshot") if id]

    # Each that was told to be committed is there, but for those that were too old to be kept, and verifies.
    assert len(told) == len(set(told))
    assert set(told if keep > len(told) else told[-keep:]) <= set(counted)
    for number, id in enumerate(counted):
        snapshots.fetch(snapshots.manifest(id), str(tmp_path / "verified" / str(number)))
    there = {id for id in map(parse_id, Folder(str(place)).folders(f"{run.folder.name}/")) if id}
    late = {known.generation, known.generation - 1}  # the last sweep may not have come to its end when the run did
    assert {id.generation for id in there - known.committed} <= late, "what was not committed is swept up"
    # Each generation began from the newest that had been committed then, which its program found whole.
    newest: Id | None = None
    for event in events:
        if event["event"] == "committed":
            newest = parse_id(event["snapshot"])
        elif event["event"] == "generation-formed":
            restored = event["restore"] and parse_id(event["restore"])
            assert restored == newest or (restored and newest and restored > newest), (event, newest)
            assert known.records[event["generation"]].parent == restored
            newest = restored
    assert not [line for log in logs for line in log.splitlines() if "half-loaded" in line or "parts of" in line]
    assert {restart["cause"] for restart in report["restarts"]} <= {"signal", "host-lost"}
    print(f"{len(sequence(keep))} faults in {seconds:.0f} s, {report['generations']} generations, {len(told)} commits")


def test_there_are_three_hundred() -> None:
    assert sum(TIMES.values()) * len(KEPT) == 300
