"""300 faults while a program saves all the time: no committed snapshot is lost, and none is loaded in part.

In a few runs, with a real bucket: their processes are killed and stopped, the store fails in the middle of requests,
snapshots are damaged, the disk of the hosts is full, clocks jump.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.storage.snapshots.generation_records import KEPT as RECORDS_KEPT
from paceline.storage.snapshots.manifest import SnapshotId, parse_id
from paceline.storage.snapshots.repository import MANIFEST, SnapshotRepository
from paceline.storage.stores.bucket import BucketStore
from support import runs
from support.clocks import Clocks
from support.event_log import EventLog
from support.runs import PROGRAMS, Event, Run, eventually, fill_names, job, kill, small_disk
from support.stores.refusing import Asked, Fault, Proxy, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.long

SEED = 20261115
LIMIT_S = 150.0  # for one recovery, on a busy machine
HOSTS = ("worker-host-0", "worker-host-1")
KEEP = 5
SIZE = 50_000  # bytes of a snapshot
STOPPED_S = 0.3  # much less than a lease: it must not be noticed
STORE = {  # what happens to a few requests; to how many at most
    "refused": (Fault(403, reaches="no"), 3),
    "busy": (Fault(503, reaches="no"), 6),
    "done, but reported as busy": (Fault(503), 4),
    "cut in the request": (Fault(reaches="half"), 4),
    "cut in the response": (Fault(half=True), 4),
    "slow": (Fault(late=0.1), 6),
}
RUNS = 3  # each has its share of the faults
FAULTS = {
    "task": 103, "both tasks": 12, "agent": 14, "host": 8, "captain": 16, "captain's host": 4, "all hosts": 1,
    **dict.fromkeys(STORE, 12), "store restarts": 6,
    "newest damaged": 16, "own copy damaged": 8, "damaged in the store": 8,
    "disk full": 12, "agent stopped": 10, "clock jumps": 10,
}  # fmt: skip


class Events:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.read = EventLog(run.folder / "events.jsonl").read

    def wait(self, description: str, after: int, matches: Callable[[Event], bool]) -> Event:
        checked = after

        def check() -> Event | None:
            nonlocal checked
            events = self.read()
            match = next((event for event in events[checked:] if matches(event)), None)
            ended = next((event for event in events[checked:] if event["event"] == "run-ended"), None)
            assert match or ended is None, f"the run has ended: {ended}\n{self.run.story()}"
            checked = len(events)
            return match

        event = eventually(description, check, LIMIT_S, self.run.story)
        assert event is not None
        return event


class History:
    """Which snapshots must exist, and from which each generation must start, by the events alone."""

    def __init__(self) -> None:
        self.chain: list[SnapshotId] = []  # snapshots that are kept, oldest first
        self.unreadable: dict[SnapshotId, int] = {}  # from which event on
        self.skipped: list[SnapshotId] = []  # by the run, because it could not read them
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
            self.skipped.append(self.chain.pop())
        newest = self.chain[-1] if self.chain else None
        if restored != newest:  # hosts have a newer one, which need not be committed
            assert restored and newest and restored > newest, (event, newest)


def snapshot(text: str) -> SnapshotId:
    id = parse_id(text)
    assert id is not None
    return id


class Chaos:
    def __init__(
        self, run: Run, state: Path, store_proxy: Proxy, server: Server, clocks: Clocks, dice: random.Random
    ) -> None:
        self.run, self.state, self.dice = run, state, dice
        self.store_proxy, self.server, self.clocks = store_proxy, server, clocks
        self.event_log, self.history = Events(run), History()
        self.generation = 1
        self.bucket = BucketStore(server.url, **server.config)
        self.snapshots = SnapshotRepository(self.bucket, run.folder.name)

    def strike(self, fault: str) -> None:
        """Injects a fault; training and commits must continue, and committed snapshots must exist."""
        for _ in range(self.dice.randrange(2)):
            self._commits(len(self.event_log.read()))
        after = len(self.event_log.read())
        rank = self.dice.randrange(2)
        inject = getattr(self, "_" + fault.replace("'", "").replace(" ", "_"), None)
        expected = inject(rank) if inject else self._store(fault, rank)
        if expected == "captain":
            self.event_log.wait("the captain is back", after, lambda event: event["event"] == "captain-returned")
        elif expected == "generation":
            self._generation(after)
        self._commits(len(self.event_log.read()))
        self.history.follow(self.event_log.read())
        for id in self.history.chain[-KEEP // 2 :]:  # older ones may have been deleted by now
            assert self.snapshots.has(id), (fault, id, self.run.story())

    def uncommitted(self) -> set[SnapshotId]:
        """Snapshots that earlier generations have not committed."""
        existing = set(filter(None, map(parse_id, self.bucket.folders(f"{self.run.folder.name}/"))))
        return {id for id in existing - self.snapshots.inventory().committed if id.generation < self.generation}

    def _commits(self, after: int) -> None:
        self.event_log.wait(
            f"a commit of generation {self.generation}", after,
            lambda event: event["event"] == "committed" and event["generation"] >= self.generation,
        )  # fmt: skip

    def _generation(self, after: int) -> Event:
        formed = self.event_log.wait(
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
        self._both_started()
        kill(self.run.agent("captain"))
        return "captain"

    def _captains_host(self, rank: int) -> str:
        self._both_started()
        kill(self.run.keeper("captain"))
        return "captain"

    def _both_started(self) -> None:
        """The captain that reports the processes must live until then."""
        for rank in (0, 1):
            self._pid(rank)

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
        """Of the current generation: it may commit its parent before its tasks have started."""

        def started() -> int:
            kind = "task-started", f"worker-{rank}"
            events = [e for e in self.event_log.read() if (e["event"], e.get("task")) == kind]
            return int(events[-1]["pid"]) if events[-1]["generation"] >= self.generation else 0

        return eventually(f"a process of worker-{rank}", started, LIMIT_S, self.run.story)

    # ---- the store, and the machine

    def _store(self, kind: str, rank: int) -> str:
        """A few requests fail, whatever they are for; a task may die meanwhile."""
        fault, limit = STORE[kind]
        remaining = self.dice.randint(1, limit)
        kills = fault.status != 403 and self.dice.random() < 0.5  # a restore that is refused is not retried

        def wrong(_: Asked) -> Fault | None:
            nonlocal remaining
            remaining -= 1
            return fault if remaining >= 0 else None

        with self.store_proxy.wrong(wrong):
            kills and self._task(rank)
            eventually("the store has received requests", lambda: remaining <= 0, LIMIT_S, self.run.story)
        return "generation" if kills else ""

    def _store_restarts(self, rank: int) -> str:
        self.server.restart()
        return ""

    def _disk_full(self, rank: int) -> str:
        """No file can be created on the hosts while the program does some steps, or dies."""
        kills, after = self.dice.random() < 0.3, len(self.event_log.read())
        ballast = fill_names(self.run.home)
        if kills:
            self._task(rank)
            self.event_log.wait("the captain notices", after, lambda event: event["event"] == "restart")
        else:
            self._trains()
        shutil.rmtree(ballast)
        return "generation" if kills else ""

    def _clock_jumps(self, rank: int) -> str:
        """That of one agent, permanently; or all others', whose requests the store refuses until it is right again."""
        process = self.dice.choice(["captain", HOSTS[rank], "all"])
        self.clocks.set(self.dice.uniform(-20, 20), process)
        if process == "all":
            self._trains()
            self.clocks.set(0)
        return ""

    def _trains(self) -> None:
        """A few steps, committed or not."""
        before = self._done()
        eventually("steps continue", lambda: self._done() > before + 2, LIMIT_S, self.run.story)

    def _done(self) -> int:
        return int((self.state / "done-0").read_text())

    # ---- damage

    def _newest_damaged(self, rank: int) -> str:
        """In all copies: the snapshot before it is restored."""
        id = self._pause()
        self.history.unreadable[id] = len(self.event_log.read())
        file = self.dice.choice(["weights-0", "sum-0", MANIFEST])
        name = f"{self.run.folder.name}/{id}/{MANIFEST if file == MANIFEST else f'worker-0/{file}'}"
        self.bucket.delete(name) if file == "sum-0" else self._spoil(name)
        self._spoil_own(id)
        return self._resume(rank, restored=lambda restore: restore is not None and restore < id)

    def _own_copy_damaged(self, rank: int) -> str:
        id = self._pause()
        self._spoil_own(id)
        return self._resume(rank, restored=lambda restore: restore == id)

    def _damaged_in_the_store(self, rank: int) -> str:
        """Its host has an intact copy."""
        id = self._pause()
        self._spoil(f"{self.run.folder.name}/{id}/worker-0/weights-0")
        follows = self._resume(rank, restored=lambda restore: restore == id)
        self.history.unreadable[id] = len(self.event_log.read())
        return follows

    def _pause(self) -> SnapshotId:
        """Pauses training; returns the newest snapshot, which is committed."""
        paused = self.state / "paused"
        paused.unlink(missing_ok=True)
        (self.state / "pause").touch()

        def newest() -> SnapshotId | None:
            self.history.follow(self.event_log.read())
            step = int(paused.read_text()) if paused.exists() else -1
            return self.history.chain[-1] if self.history.chain[-1].step == step else None

        id = eventually("all is committed", newest, LIMIT_S, self.run.story)
        assert id is not None
        return id

    def _spoil(self, name: str) -> None:
        (self.state / "other").write_bytes(b"other")
        self.bucket.send_all([(str(self.state / "other"), name)], lambda _: True, {})

    def _spoil_own(self, id: SnapshotId) -> None:
        for path in (self.run.folder / "held" / "worker-0" / str(id)).iterdir():
            path.write_bytes(b"other")

    def _resume(self, rank: int, restored: Callable[[SnapshotId | None], bool]) -> str:
        after = len(self.event_log.read())
        self._task(rank)
        formed = self._generation(after)
        assert restored(formed["restore"] and parse_id(formed["restore"])), formed
        (self.state / "pause").unlink()
        return ""


def shares() -> list[list[str]]:
    faults = [fault for fault, times in FAULTS.items() for _ in range(times)]
    random.Random(SEED).shuffle(faults)
    return [faults[number::RUNS] for number in range(RUNS)]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", range(RUNS))
def test_no_committed_snapshot_is_lost(number: int, s3: Server, tmp_path: Path) -> None:
    state, home = tmp_path / "state", tmp_path / "home"
    state.mkdir()
    home.mkdir()
    dice, faults = random.Random(f"{SEED} {number}"), shares()[number]
    faults.append(faults.pop(faults.index("task")))  # after which nothing else goes wrong
    program = ["python", str(PROGRAMS / "saves.py"), str(state), "--every", "0.03", "--size", str(SIZE)]
    fields = job(program, snapshots={"to": s3.url, "keep": KEEP}, restart={"limit": 3})
    began = time.monotonic()
    clocks = Clocks(tmp_path)
    with small_disk(home, "1g,nr_inodes=1500"), proxy(s3.port) as store_proxy, runs.starter(tmp_path) as start:
        run = start(fields, home=home, env={**clocks.env, **s3.through(store_proxy).options})
        run.wait("committed")
        chaos = Chaos(run, state, store_proxy, s3, clocks, dice)
        for fault in faults:
            chaos.strike(fault)
        eventually("uncommitted snapshots are deleted", lambda: not chaos.uncommitted(), LIMIT_S, run.story)
        (state / "finish").touch()
        report = run.succeeds(LIMIT_S)
        events = chaos.event_log.read()
        logs = [run.log(task) for task in ("worker-0", "worker-1")]
    history, snapshots = chaos.history, chaos.snapshots
    history.follow(events)
    inventory = snapshots.inventory()

    # Every snapshot that was reported as committed exists and is valid, except those that were too old to be kept. A
    # snapshot whose commit seemed to fail may exist, too.
    current = inventory.current()
    reported = [id for id in current if id in history.chain]
    assert len(current) <= KEEP and reported == history.chain[::-1][: len(reported)]
    assert len(current) == KEEP or reported == history.chain[::-1]
    for id in set(reported) - set(history.unreadable):
        snapshots.fetch(snapshots.manifest(id), str(tmp_path / "verified" / str(id)))
    # Each generation started from the newest readable snapshot, which its program found complete.
    for event in events:
        if event["event"] == "generation-formed" and event["generation"] >= min(inventory.records):
            assert inventory.records[event["generation"]].parent == (event["restore"] and parse_id(event["restore"]))
    oldest = min([report["generations"] - RECORDS_KEPT, *(id.generation for id in reported)])
    assert min(inventory.records) <= max(1, oldest)
    assert len(set(history.skipped)) >= faults.count("newest damaged")
    assert not [line for log in logs for line in log.splitlines() if "half-loaded" in line or "parts of" in line]
    expected = ("signal", "host-lost", "start-failed")  # the last one while the disk is full
    others = [restart for restart in report["restarts"] if restart["cause"] not in expected]
    assert not others, others
    commits = sum(event["event"] == "committed" for event in events)
    seconds = time.monotonic() - began
    print(f"{len(faults)} faults in {seconds:.0f} s, {report['generations']} generations, {commits} commits")
