"""A month of one run in minutes: the captain's real process objects on a simulated clock, with simulated members.

Only the clock, the sockets and the porter's process are replaced: messages are encoded and decoded as on the wire, the
captain's files are real, and requests to the store are executed in a real folder. Prints one JSON object per quarter of
a simulated day: the memory, Python objects, descriptors and threads of this process, and the sizes of files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paceline import plan as planning
from paceline.agent import run_files
from paceline.agent.captain import events as ev
from paceline.agent.captain.ledger import OVER
from paceline.agent.captain.state_machine import Captain
from paceline.agent.captain_process import connections, event_log, process
from paceline.agent.net import loop as loops
from paceline.agent.net import messages
from paceline.agent.net.frames import Decoder, encode
from paceline.agent.options import Options
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import Porter
from paceline.storage.snapshots.manifest import SnapshotId, parse_id
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores.folder import FolderStore
from support.worlds import LEASE, Machine, Place, Start, World, make_plan

RUN = "month-3f9a"
HOUR, DAY = 3600.0, 86400.0
SAMPLES_A_DAY = 4
EVALUATORS = 2
SAVE_EVERY = 600.0  # seconds between two snapshots
UPLOAD_S = 40.0  # how long the store takes for a snapshot
# Seconds between two of each, on average.
FAULTS = {
    "task fails": 40 * 60.0, "connection breaks": HOUR, "agent dies": 3 * HOUR, "host is replaced": 2 * HOUR,
    "store fails": 2 * HOUR, "loss is NaN": DAY, "warning": HOUR / 4,
}  # fmt: skip
STORE_AWAY_S = 600.0
IGNORED = ("welcome", "wait", "beat", "roster")  # messages of the captain that simulated members do not need
SETTLING_S = 2.5  # the clock advances by this until all tasks run again


class Clock:
    """Stands in for the module `time`."""

    strftime, gmtime, strptime = staticmethod(time.strftime), staticmethod(time.gmtime), staticmethod(time.strptime)

    def __init__(self, wall: float) -> None:
        self._wall = wall
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self._wall + self.now


class Link:
    """Stands in for a TLS connection: what the captain sends goes to the member's inbox."""

    open = True

    def __init__(self, member: Member, *_: Any, **__: Any) -> None:
        self._member, self._decoder, self._received = member, Decoder(), list[messages.Message]()

    def fileno(self) -> int:
        return -1

    def interest(self) -> int:
        return 0

    def close(self) -> None:
        self._member.on_closed(self)

    def send_bytes(self, *frames: bytes) -> None:
        for frame in frames:
            for message in self._decoder.feed(frame):
                if message["type"] not in IGNORED:
                    self._member.receive(messages.read_captain(message, self._member.host))

    def ready(self) -> list[messages.Message]:
        received, self._received = self._received, []
        return received

    def put(self, message: messages.Message) -> None:
        self._received += Decoder().feed(encode(message))


class Member:
    """The connection of a simulated host."""

    def __init__(self, world: Month, host: str) -> None:
        self.world, self.host = world, host
        self.connection: connections.Connection | None = None

    def on_closed(self, link: Link) -> None:
        """The captain has closed it: the member reconnects, if it was waiting to replace another instance."""
        connection = self.connection
        if connection is None or connection.link is not link:
            return
        self.connection = None
        self.world.machines[self.host].connected = False
        if connection.host and self.world.captain.phase != OVER:
            raise SystemExit(f"the captain has dropped {self.host}; see {self.world.folder}")

    def receive(self, message: messages.CaptainMessage | None) -> None:
        inbox = self.world.machines[self.host].inbox
        if isinstance(message, messages.StartOnHost):
            restore = None if message.restore is None else parse_id(message.restore)
            inbox.append(Start(message.generation, message.tasks, restore, message.data, message.records))
        else:
            inbox.append(message)

    def send(self, message: messages.Message) -> None:
        if self.connection is not None:
            self.connection.link.put(message)
            self.connection._on_ready()
            if self.connection is None and not isinstance(self.world.over, str):
                raise SystemExit(f"the captain has closed the connection of {self.host} after: {message}")


class InlinePorter:
    """Stands in for the client of the porter's process: requests are executed here, and answered after a while."""

    world: Month

    def __init__(self, settings: Any, environment: Any, loop: loops.Loop) -> None:
        self._loop, self._is_closed = loop, False
        store = FolderStore(str(self.world.folder / "store"))
        repository = SnapshotRepository(store, RUN)
        self._porter = Porter(repository, repository, lambda *_: None, lanes=(), archive=StoredRunFiles(store, RUN))

    def ask(self, request: req.Request, answered: Any) -> int:
        fails = self.world.place.fails
        answer: req.Answer = fails if fails is not None else self._porter.execute(request)
        delay = UPLOAD_S if isinstance(request, req.CommitSnapshot) else 0.0
        self._loop.after(delay, lambda: None if self._is_closed else answered(answer))
        return 0

    def close(self) -> None:
        self._is_closed = True

    def cancel(self, number: int) -> None: ...
    def child_ended(self, pid: int) -> bool:
        return False


class NoParts(Place):
    """Hosts have no files, so nothing is kept of the parts that they send."""

    def send(self, task: str, snapshot: SnapshotId) -> None: ...


class Month(World):
    """The world of the captain's tests, with the captain's process instead of only its state machine."""

    def __init__(self, plan: planning.Plan, folder: Path, clock: Clock, beat: float) -> None:
        self.folder, self.clock, self._beat_every = folder, clock, beat
        self._members: dict[str, Member] = {}
        self._process: process.CaptainProcess | None = None
        super().__init__(plan)
        self.place = NoParts()
        self._members = {host: Member(self, host) for host in self.machines}
        self._host_of = {task.name: task.host for task in plan.tasks}
        self.step_now = 0
        self._store_back_at = 0.0
        self.messages = 0
        self.start_captain()

    @property
    def now(self) -> float:
        return self.clock.now

    @now.setter
    def now(self, now: float) -> None:
        self.clock.now = now

    def start_captain(self) -> None:
        InlinePorter.world = self
        plan = str(self.folder / "plan.json")
        options = Options(RUN, planning.CAPTAIN, plan, str(self.folder), "", "127.0.0.1:1", echo=True)
        self._process = process.CaptainProcess(options)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.captain: Captain = self._process._captain
        self.running_loop = self._process.loop

    def end_captain(self) -> None:
        """As if its process were killed."""
        assert self._process is not None
        self._process._porter.close()
        loop, log = self._process.loop, self._process._log
        loop._timers.clear()
        loop._selector.close()
        loop._wake_read.close()
        loop._wake_write.close()
        log._file.close()
        if log._uploaded is not None:
            log._uploaded.close()
        if log._file._series._file is not None:
            log._file._series._file.close()
        for machine in self.machines.values():
            machine.connected = False
            machine.inbox.clear()
        for member in self._members.values():
            member.connection = None
        self._process = None

    def tell(self, event: ev.Event) -> None:
        self.messages += 1
        if isinstance(event, (ev.MemberJoined, ev.TasksEnded)):
            event = replace(event, offers=dict.fromkeys(event.offers, "10.0.0.1:2222"))
        if isinstance(event, ev.MemberDisconnected):
            member = self._members[event.host]
            connection, member.connection = member.connection, None
            if connection is not None:
                connection._connections.drop(connection)
        elif isinstance(event, ev.MemberJoined):
            member = self._members[event.host]
            assert self._process is not None
            before = set(self._process._connections.open)
            self._process._connections._admit(member)
            (member.connection,) = self._process._connections.open - before
            member.send(messages.join_message(RUN, event))
        elif not isinstance(event, (ev.Tick, ev.StoreAnswered, ev.StopRequested)):
            self._members[event.host].send(messages.member_message(event))

    def _check_restored(self, restore: SnapshotId | None, generation: int) -> None:
        """Not checked here: it would list the store once for each of the members."""

    def _check_source(self, machine: Machine, task: str, address: str, snapshot: SnapshotId) -> None: ...

    def _assign(self, machine: Machine, task: str, snapshot: SnapshotId | None) -> None:
        if snapshot is not None and machine.follows.get(task, snapshot) is None:
            machine.follows[task] = snapshot

    def beat_all(self) -> None:
        """Each member that has been silent for a while sends what its task has reported."""
        for machine in self.machines.values():
            connection = self._members[machine.host].connection
            has_joined = connection is not None and bool(connection.host)
            if has_joined and self.now - machine.lease_from >= LEASE / 2:
                machine.lease_from = self.now
                self.messages += 1
                progress = {
                    name: ev.TaskProgress(each.step, 0.0, 0.0, {"loss": 1.0 / (1 + each.step % 1000), "lr": 0.001})
                    for name, each in machine.processes.items()
                    if each.step is not None
                }
                beat = ev.Heartbeat(machine.host, self.messages, progress, 0.5)
                self._members[machine.host].send(messages.member_message(beat))

    def pass_time(self, seconds: float) -> None:
        """Everything that is due happens, and all messages arrive; heartbeats first: the captain would drop members
        that have been silent for longer than a lease."""
        assert self._process is not None
        self.clock.now += seconds
        self.beat_all()
        if self.now >= self._store_back_at:
            self.place.fails = None
        self._process.loop.once(0.0)
        for _ in range(20):
            for host in [host for host, machine in self.machines.items() if machine.inbox]:
                self.deliver(host)
            self._process.loop.once(0.0)
            if not any(machine.inbox for machine in self.machines.values()):
                break
        for ghost in self.ghosts:
            ghost.processes.clear()
        self.ghosts.clear()
        for record in (self.events, self.started, self.told_committed, self.evaluated):
            record.clear()  # what only tests need

    # ---- training

    def train(self) -> None:
        """One interval between two heartbeats."""
        self.step_now += int(self._beat_every)
        for machine in self.machines.values():
            for name, each in machine.processes.items():
                if not name.startswith("evaluator"):
                    each.step = self.step_now
        self.join_all()
        self.pass_time(self._beat_every)
        for number in range(EVALUATORS):
            self.follow(f"evaluator-{number}")
            self.evaluate(f"evaluator-{number}", accuracy=self.step_now / 1e7 + 0.01 * random.random())

    def settle(self, limit: float = 30 * 60.0) -> None:
        """Until all tasks run again."""
        end = self.now + limit
        while self.now < end:
            self.join_all()
            self.pass_time(SETTLING_S)
            if sum(len(machine.processes) for machine in self.machines.values()) == len(self.plan.tasks):
                return
        raise SystemExit(f"tasks do not run again within {limit:g} s: phase {self.captain.phase}; see {self.folder}")

    def save_all(self, step: int) -> None:
        workers = [task.name for task in self.plan.tasks if task.role == "worker"]
        for name in workers:
            self.save(name, step, len(workers), loss=1.0 / step)

    def fault(self, kind: str) -> None:
        worker = f"worker-{random.randrange(len(self.plan.tasks) - EVALUATORS)}"
        host = self._host_of[worker]
        if kind == "task fails":
            self.exit(worker, "signal")
        elif kind == "connection breaks":
            self.disconnect(host)
        elif kind == "agent dies":
            self.agent_dies(host)
        elif kind == "host is replaced":
            self.host_is_replaced(random.choice(list(self.machines)), dead=random.random() < 0.5)
        elif kind == "store fails":
            self.place.fails, self._store_back_at = req.Failure(req.STORE, "away", True), self.now + STORE_AWAY_S
        elif kind == "loss is NaN":
            self.report(worker, self.step_now + 1)
        elif kind == "warning":
            self.tell(ev.Notice(host, f"{worker}: something unusual at step {self.step_now}", warning=True))


def measure(folder: Path, world: Month, day: float, lives: int) -> dict[str, Any]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "day": day, "memory": int(status["RssAnon"].split()[0]) * 1024, "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())), "threads": int(status["Threads"]),
        "files": _sizes(folder), "messages": world.messages, "generation": world.captain.generation, "captains": lives,
    }  # fmt: skip


def _sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes and number of files: by name, and by folder in the series and in the store."""
    sizes: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            kind, *rest = path.relative_to(folder).parts
            if kind == "series":
                kind = f"{kind}/{rest[0]}"
            elif kind == "store":
                kind = f"{kind}/{rest[1] if rest[1] in ('generations', 'logs') else 'snapshots'}"
            size, count = sizes.get(kind, (0, 0))
            sizes[kind] = size + path.stat().st_size, count + 1
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--beat", type=float, default=60.0, help="seconds between heartbeats")
    parser.add_argument("--seconds", type=float, default=0.0, help="at least; then it waits between two samples")
    parser.add_argument("--restart-every", type=float, default=0.0, help="days of each captain; 0: only one captain")
    args = parser.parse_args()
    random.seed(1)
    output = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # the captain copies its events to stdout, as on a cluster
    clock = Clock(time.time() - args.days * DAY)
    for module in (run_files, event_log, process, loops):
        module.time = clock
    os.fsync = lambda _: None  # nothing is lost with this machine
    connections.TlsLink = Link
    connections.context = lambda *_, **__: None
    connections.Listener = lambda *_: SimpleNamespace(stop=lambda: None)
    process.PorterClient = InlinePorter
    plan = _plan(args.members)
    (args.folder / "plan.json").write_text(planning.to_json(plan))
    world = Month(plan, args.folder, clock, args.beat)
    _run(world, args, output)


def _plan(members: int) -> planning.Plan:
    plan = make_plan(
        members - EVALUATORS, evaluator=EVALUATORS, limit=1000, hang_after=6 * HOUR, start=DAY, on_nan=planning.ROLLBACK
    )
    return replace(plan, snapshots=planning.Snapshots(to="s3://soak/month", best=("accuracy", False)))


def _run(world: Month, args: argparse.Namespace, output: Any) -> None:
    began, began_at, lives = time.monotonic(), world.now, 1
    world.settle()
    due = {kind: world.now + random.expovariate(1 / mean) for kind, mean in FAULTS.items()}
    save_at, sample_at = world.now + SAVE_EVERY, world.now
    restart_at = world.now + args.restart_every * DAY if args.restart_every else float("inf")
    while world.now < began_at + args.days * DAY:
        if world.captain.phase == OVER:
            raise SystemExit(f"the run ended on day {(world.now - began_at) / DAY:.1f}; see {args.folder}/report.json")
        world.train()
        if world.now >= save_at:
            save_at = world.now + SAVE_EVERY
            world.save_all(world.step_now)
        for kind, at in due.items():
            if world.now < at:
                continue
            due[kind] = world.now + random.expovariate(1 / FAULTS[kind])
            world.fault(kind)
            world.settle()
        if world.now >= restart_at:
            restart_at = world.now + args.restart_every * DAY
            lives += 1
            world.end_captain()
            world.start_captain()
            world.settle()
        if world.now >= sample_at:
            day = (world.now - began_at) / DAY
            sample_at += DAY / SAMPLES_A_DAY
            print(json.dumps(measure(args.folder, world, round(day, 2), lives)), file=output)
            ahead = args.seconds * day / args.days - (time.monotonic() - began)
            time.sleep(max(0.0, ahead))
    print(json.dumps(measure(args.folder, world, args.days, lives)), file=output)


if __name__ == "__main__":
    main()
