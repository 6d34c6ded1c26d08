"""Faults without end while a program saves all the time: nothing that was committed is lost, nothing is half-loaded.

One run, at a real bucket: its processes are killed and stopped, the store fails in the middle of requests, snapshots
are damaged, the disk of the hosts is full, clocks jump.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.storage.manifest import Id, parse_id
from paceline.storage.objects import Objects
from paceline.storage.snapshots import MANIFEST, Snapshots
from support import runs
from support.clocks import Clocks
from support.runs import PROGRAMS, Event, Run, eventually, fill_names, job, kill, small_disk
from support.stores.refusing import Asked, Fault, Proxy, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.long

SEED = 20261115
LIMIT_S = 60.0  # for one recovery, on a machine that has other things to do
HOSTS = ("worker-host-0", "worker-host-1")
KEEP = 5
SIZE = 50_000  # bytes of a snapshot
STOPPED_S = 0.3  # much less than a lease: nobody is to notice
STORE = {  # what becomes of a few requests; how many may be hit
    "refused": (Fault(403, reaches="no"), 3),
    "busy": (Fault(503, reaches="no"), 6),
    "done, and said to be too busy": (Fault(503), 4),
    "cut on the way there": (Fault(reaches="half"), 4),
    "cut on the way back": (Fault(half=True), 4),
    "slow": (Fault(late=0.1), 6),
}
FAULTS = {
    "task": 103, "both tasks": 12, "agent": 14, "host": 8, "captain": 16, "captain's host": 4, "all hosts": 1,
    **dict.fromkeys(STORE, 12), "store restarts": 6,
    "newest damaged": 16, "own copy damaged": 8, "damaged at the place": 8,
    "disk full": 12, "agent stopped": 10, "clock jumps": 10,
}  # fmt: skip


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


class History:
    """What has to be there, and what each generation has to begin from, by the events alone."""

    def __init__(self) -> None:
        self.chain: list[Id] = []  # of those that are kept, oldest first
        self.unreadable: dict[Id, int] = {}  # from which event on
        self.passed: list[Id] = []  # by the run, as it could not read them
        self._read = 0

    def follow(self, events: list[Event]) -> None:
        for number, event in enumerate(events[self._read :], self._read):
            if event["event"] == "committed":
                self.chain = [*self.chain[1 - KEEP :], snapshot(event["snapshot"])]
            elif event["event"] == "generation-formed":
                self._begin(number, event)
        self._read = len(events)

    def _begin(self, number: int, event: Event) -> None:
        restored = snapshot(event["restore"]) if event["restore"] else None
        while self.chain and self.unreadable.get(self.chain[-1], number + 1) <= number:
            self.passed.append(self.chain.pop())
        newest = self.chain[-1] if self.chain else None
        if restored != newest:  # one may have been committed by a captain that died before it could say so
            assert restored and newest and restored > newest, (event, newest)
            self.chain.append(restored)


def snapshot(text: str) -> Id:
    found = parse_id(text)
    assert found is not None
    return found


class Chaos:
    def __init__(self, run: Run, state: Path, way: Proxy, server: Server, clocks: Clocks, dice: random.Random) -> None:
        self.run, self.state, self.dice = run, state, dice
        self.way, self.server, self.clocks = way, server, clocks
        self.told, self.history = Told(run), History()
        self.generation = 1
        self.place = Objects(server.url, **server.config)
        self.snapshots = Snapshots(self.place, run.folder.name)

    def strike(self, fault: str) -> None:
        """And all that has to follow from it: somebody trains, and commits, and what was committed is there."""
        for _ in range(self.dice.randrange(2)):
            self._commits(len(self.told.read()))
        after = len(self.told.read())
        rank = self.dice.randrange(2)
        does = getattr(self, "_" + fault.replace("'", "").replace(" ", "_"), None)
        follows = does(rank) if does else self._store(fault, rank)
        if follows == "captain":
            self.told.wait("the captain is back", after, lambda event: event["event"] == "captain-returned")
        elif follows == "generation":
            self._generation(after)
        self._commits(len(self.told.read()))
        self.history.follow(self.told.read())
        for id in self.history.chain[-KEEP // 2 :]:  # those before them may be too old by now
            assert self.snapshots.has(id), (fault, id, self.run.story())

    def left(self) -> set[Id]:
        """What generations before this one have not committed."""
        there = set(filter(None, map(parse_id, self.place.folders(f"{self.run.folder.name}/"))))
        return {id for id in there - self.snapshots.known().committed if id.generation < self.generation}

    def _commits(self, after: int) -> None:
        self.told.wait(
            f"a commit of generation {self.generation}", after,
            lambda event: event["event"] == "committed" and event["generation"] >= self.generation,
        )  # fmt: skip

    def _generation(self, after: int) -> Event:
        formed = self.told.wait(
            f"a generation after {self.generation}", after,
            lambda event: event["event"] == "generation-formed" and event["generation"] > self.generation,
        )  # fmt: skip
        self.generation = formed["generation"]
        return formed

    # ---- processes

    def _task(self, rank: int) -> str:
        kill(self._pid(rank))
        return "generation"

    def _both_tasks(self, rank: int) -> str:
        for pid in [self._pid(0), self._pid(1)]:
            kill(pid)
        return "generation"

    def _agent(self, rank: int) -> str:
        kill(self.run.agent(HOSTS[rank]))
        return "generation"

    def _host(self, rank: int) -> str:
        kill(self.run.keeper(HOSTS[rank]))
        return "generation"

    def _captain(self, rank: int) -> str:
        kill(self.run.agent("captain"))
        return "captain"

    def _captains_host(self, rank: int) -> str:
        kill(self.run.keeper("captain"))
        return "captain"

    def _all_hosts(self, rank: int) -> str:
        for host in ("captain", *HOSTS):
            kill(self.run.keeper(host))
        return "generation"

    def _agent_stopped(self, rank: int) -> str:
        agent = self.run.agent(self.dice.choice([*HOSTS, "captain"]))
        kill(agent, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        kill(agent, signal.SIGCONT)
        return ""

    def _pid(self, rank: int) -> int:
        started = [e for e in self.told.read() if e["event"] == "task-started" and e["task"] == f"worker-{rank}"]
        return int(started[-1]["pid"])

    # ---- the store, and the machine

    def _store(self, kind: str, rank: int) -> str:
        """A few requests, whatever they are for; a task dies meanwhile or not."""
        fault, most = STORE[kind]
        left = self.dice.randint(1, most)
        kills = fault.status != 403 and self.dice.random() < 0.5  # who is refused a restore does not try again

        def wrong(_: Asked) -> Fault | None:
            nonlocal left
            left -= 1
            return fault if left >= 0 else None

        with self.way.wrong(wrong):
            kills and self._task(rank)
            eventually("the store was asked", lambda: left <= 0, LIMIT_S, self.run.story)
        return "generation" if kills else ""

    def _store_restarts(self, rank: int) -> str:
        self.server.restart()
        return ""

    def _disk_full(self, rank: int) -> str:
        """No file can be made on the hosts, while the program does some steps, or dies."""
        kills, after = self.dice.random() < 0.3, len(self.told.read())
        ballast = fill_names(self.run.home)
        if kills:
            self._task(rank)
            self.told.wait("somebody notices", after, lambda event: event["event"] == "restart")
        else:
            self._trains()
        shutil.rmtree(ballast)
        return "generation" if kills else ""

    def _clock_jumps(self, rank: int) -> str:
        """That of one agent, and stays so; or all others', whose requests the store refuses until it is right again."""
        process = self.dice.choice(["captain", HOSTS[rank], "all"])
        self.clocks.set(self.dice.uniform(-20, 20), process)
        if process == "all":
            self._trains()
            self.clocks.set(0)
        return ""

    def _trains(self) -> None:
        """A few steps, committed or not."""
        before = self._done()
        eventually("steps go on", lambda: self._done() > before + 2, LIMIT_S, self.run.story)

    def _done(self) -> int:
        return int((self.state / "done-0").read_text())

    # ---- damage

    def _newest_damaged(self, rank: int) -> str:
        """Wherever it is: the one before it is restored."""
        id = self._quiet()
        self.history.unreadable[id] = len(self.told.read())
        how = self.dice.choice(["weights-0", "sum-0", MANIFEST])
        name = f"{self.run.folder.name}/{id}/{MANIFEST if how == MANIFEST else f'worker-0/{how}'}"
        self.place.delete(name) if how == "sum-0" else self._spoil(name)
        self._spoil_own(id)
        return self._goes_on(rank, restored=lambda found: found is not None and found < id)

    def _own_copy_damaged(self, rank: int) -> str:
        id = self._quiet()
        self._spoil_own(id)
        return self._goes_on(rank, restored=lambda found: found == id)

    def _damaged_at_the_place(self, rank: int) -> str:
        """Its host has it as it was."""
        id = self._quiet()
        self._spoil(f"{self.run.folder.name}/{id}/worker-0/weights-0")
        follows = self._goes_on(rank, restored=lambda found: found == id)
        self.history.unreadable[id] = len(self.told.read())
        return follows

    def _quiet(self) -> Id:
        """The newest, which is committed, and nothing newer comes."""
        paused = self.state / "paused"
        paused.unlink(missing_ok=True)
        (self.state / "pause").touch()

        def newest() -> Id | None:
            self.history.follow(self.told.read())
            step = int(paused.read_text()) if paused.exists() else -1
            return self.history.chain[-1] if self.history.chain[-1].step == step else None

        found = eventually("all is committed", newest, LIMIT_S, self.run.story)
        assert found is not None
        return found

    def _spoil(self, name: str) -> None:
        (self.state / "other").write_bytes(b"other")
        self.place.send_all([(str(self.state / "other"), name)], lambda _: True, {})

    def _spoil_own(self, id: Id) -> None:
        for path in (self.run.folder / "held" / "worker-0" / str(id)).iterdir():
            path.write_bytes(b"other")

    def _goes_on(self, rank: int, restored: Callable[[Id | None], bool]) -> str:
        after = len(self.told.read())
        self._task(rank)
        formed = self._generation(after)
        assert restored(formed["restore"] and parse_id(formed["restore"])), formed
        (self.state / "pause").unlink()
        return ""


@pytest.mark.timeout(600)
def test_nothing_that_was_committed_is_lost(s3: Server, tmp_path: Path) -> None:
    state, home = tmp_path / "state", tmp_path / "home"
    state.mkdir()
    home.mkdir()
    dice = random.Random(SEED)
    faults = [fault for fault, times in FAULTS.items() for _ in range(times)]
    dice.shuffle(faults)
    faults.append(faults.pop(faults.index("task")))  # after which nothing else goes wrong
    program = ["python", str(PROGRAMS / "saves.py"), str(state), "--every", "0.03", "--size", str(SIZE)]
    made = job(program, snapshots={"to": s3.url, "keep": KEEP}, restart={"limit": 3})
    began = time.monotonic()
    clocks = Clocks(tmp_path)
    with small_disk(home, "1g,nr_inodes=1500"), proxy(s3.port) as way, runs.starter(tmp_path) as start:
        run = start(made, home=home, env={**clocks.env, **s3.through(way).options})
        run.wait("committed")
        chaos = Chaos(run, state, way, s3, clocks, dice)
        for fault in faults:
            chaos.strike(fault)
        eventually("what was not committed is swept up", lambda: not chaos.left(), LIMIT_S, run.story)
        (state / "finish").touch()
        report = run.succeeds(LIMIT_S)
        events = chaos.told.read()
        logs = [run.log(task) for task in ("worker-0", "worker-1")]
    history, snapshots = chaos.history, chaos.snapshots
    history.follow(events)
    known = snapshots.known()

    # Each that was told to be committed is there, but for those that were too old to be kept, and verifies.
    assert known.counted() == history.chain[::-1]
    for id in set(history.chain) - set(history.unreadable):
        snapshots.fetch(snapshots.manifest(id), str(tmp_path / "verified" / str(id)))
    # Each generation began from the newest that had been committed and could be read, which its program found whole.
    for event in events:
        if event["event"] == "generation-formed":
            assert known.records[event["generation"]].parent == (event["restore"] and parse_id(event["restore"]))
    assert len(set(history.passed)) >= FAULTS["newest damaged"]
    assert not [line for log in logs for line in log.splitlines() if "half-loaded" in line or "parts of" in line]
    assert {restart["cause"] for restart in report["restarts"]} <= {"signal", "host-lost"}
    commits = sum(event["event"] == "committed" for event in events)
    seconds = time.monotonic() - began
    print(f"{len(faults)} faults in {seconds:.0f} s, {report['generations']} generations, {commits} commits")
