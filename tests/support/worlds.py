"""A world around a captain, without sockets: members with leases, messages that wait, hosts that come and go."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent import events as ev
from paceline.agent.captain import Captain
from paceline.agent.ledger import OVER
from paceline.agent.porter import Porter
from paceline.plan import ALONE, GROUP, INGEST, LEAD, VERSION, Host, Ingest, Limits, Plan, Restart, Role, Task
from paceline.plan import Snapshots as Settings
from paceline.storage.manifest import File, Id, parse, parse_id
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import Sent, Wanted

LEASE = 10.0


def make_plan(
    workers: int = 2,
    *,
    evaluator: int = 0,
    ps: int = 0,
    chief: bool = False,
    per_host: int = 1,
    limit: int = 3,
    hang_after: float | None = 60.0,
    runtime: float | None = None,
    start: float = 300.0,
    watch: str = "",
    ingest: bool = False,
    ingest_limit: float = 3600.0,
) -> Plan:
    """A plan by hand: the captain's tests do not need a job file."""
    roles, hosts, tasks = [], [], []
    counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": evaluator}
    rank = 0
    for name, count in counts.items():
        if not count:
            continue
        alone = name == "evaluator" or (ps and name == "worker")
        restarts = ALONE if alone else LEAD if ps else GROUP
        decides = name == ("chief" if chief else "worker")
        roles.append(Role(name, ("python", "train.py"), {}, restarts, name in ("chief", "worker"), decides))
        for index in range(0, count, per_host):
            names = tuple(f"{name}-{i}" for i in range(index, min(count, index + per_host)))
            host = f"{name}-host-{index // per_host}"
            hosts.append(Host(host, name, index // per_host, 0, 0, None, None, names))
            for local, task in enumerate(names):
                tasks.append(Task(task, name, index + local, host, local, rank if restarts == GROUP else -1))
                rank += 1
    strategy = "parameter-server" if ps else "multi-worker"
    limits = Limits(start, runtime, 5.0)
    return Plan(
        VERSION, "job", "tensorflow", strategy, "/", tuple(roles), tuple(hosts), tuple(tasks),
        Restart(limit, hang_after, True), limits, Settings(watch=watch),
        Ingest(("python", "ingest.py"), "/data", limit=ingest_limit) if ingest else None,
    )  # fmt: skip


class Memory:
    """A store without a disk."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> bool:
        return self._kept.setdefault(name, data) is data

    def read(self, name: str, most: int) -> bytes | None:
        return self._kept.get(name)

    def has(self, name: str) -> bool:
        return name in self._kept

    def folders(self, prefix: str) -> list[str]:
        return sorted({name[len(prefix) :].split("/")[0] for name in self.names(prefix)})

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self._kept if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self._kept.pop(name, None)

    def clear(self, prefix: str) -> None:
        for name in self.names(prefix):
            self.delete(name)

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted, sent: Sent) -> None:
        for path, name in files:
            data = self._kept[name] = Path(path).read_bytes()
            sent[name] = len(data), hashlib.sha256(data).hexdigest()

    def at_once(self, size: int) -> int:
        return 1

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        raise NotImplementedError

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        raise NotImplementedError


def _id(text: str) -> Id:
    found = parse_id(text)
    assert found is not None
    return found


@dataclass
class Process:
    attempt: int
    generation: int
    step: int | None = None
    step_at: float = 0.0
    output_at: float = 0.0


@dataclass
class Machine:
    """A host as it really is, whatever the captain believes."""

    host: str
    instance: str
    agent: int = 1
    replaces: bool = True
    place: str = ""
    connected: bool = False
    generation: int = 0
    lease_from: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    exits: dict[str, ev.Exit] = field(default_factory=dict)
    inbox: deque[ev.Instruction] = field(default_factory=deque)
    finished: bool = False
    held: dict[tuple[str, Id], ev.Saved] = field(default_factory=dict)
    stored: set[tuple[str, Id]] = field(default_factory=set)  # what this agent has sent, and does not send again
    restored: Id | None = None
    prepared: int = 0  # the generation that it is ready for
    shown: Id | None = None  # to evaluators
    follows: dict[str, Id | None] = field(default_factory=dict)  # what each evaluates; None: it waits for one
    unnoted: dict[Id, ev.Evaluated] = field(default_factory=dict)  # on disk
    data: str = ""  # where it is


class Place:
    """A place for snapshots that always works, unless it is told to fail; what is asked waits until it answers."""

    def __init__(self) -> None:
        self.store = Memory()
        self.snapshots = Snapshots(self.store, "run")
        self.asked: deque[dict[str, Any]] = deque()
        self.fails: dict[str, Any] | None = None
        self.read_only: dict[str, Any] | None = None  # what it says to who wants to write
        self.by = "captain"
        self.sent: set[tuple[str, Id]] = set()
        self.damaged: set[Id] = set()
        self.damage = "damaged"  # or "newer"
        self.origin = ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if error := self.fails or (request["do"] != "known" and self.read_only):
            return {"error": error}
        if request["do"] == "commit":
            made = parse(request["manifest"].encode(), "manifest")
            assert {(part.task, made.id) for part in made.parts} <= self.sent, "a manifest without its files"
        porter = Porter(self.snapshots, self.snapshots, lambda _: None, lanes=(), origin=self.origin)
        return porter.done({**request, "id": 0}, 0)


class World:
    def __init__(self, plan: Plan, copies: bool = False) -> None:
        self.plan = plan
        self.copies = copies = copies or plan.snapshots.in_bucket
        self.now = 1000.0
        self.captain: Captain = Captain(plan, "run", LEASE, self.now, self.now, copies=copies)
        self.machines = {host.name: Machine(host.name, f"{host.name}-a") for host in plan.hosts}
        self.ghosts: list[Machine] = []  # replaced hosts that still run until their lease ends
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.over: ev.Over | None = None
        self.left: str | None = None
        self.place = Place()
        self.place.origin = plan.snapshots.origin
        self.told_committed: list[Id] = []
        self.evaluated: list[Id] = []  # in the order in which evaluators were done
        self.no_more: list[str] = []  # evaluators that have seen the last one
        self.data_is_there = False
        self._instances = 0
        self.started: list[tuple[str, int]] = []  # tasks and their generations in the order in which they began

    # ---- the captain

    def tell(self, told: ev.Told) -> None:
        for instruction in self.captain.handle(told, self.now):
            if isinstance(instruction, ev.Emit):
                self.events.append((instruction.kind, instruction.generation, instruction.fields))
                if instruction.kind == "committed":
                    self.told_committed.append(_id(instruction.fields["snapshot"]))
            elif isinstance(instruction, ev.Over):
                self.over = instruction
            elif isinstance(instruction, ev.Leave):
                self.left = instruction.reason
            elif isinstance(instruction, ev.Ask):
                self.place.asked.append({"by": self.place.by, **instruction.request})
            elif isinstance(instruction, ev.Start):
                for host, tasks in instruction.hosts.items():
                    words = instruction.generation, tasks, instruction.restore, instruction.data
                    self.machines[host].inbox.append(words)
            else:
                self.machines[instruction.host].inbox.append(instruction)

    def restart_captain(self, with_notes: bool = True, wall: float = 0.0, ahead: float = 0.0) -> None:
        """`wall`: what the clock on the wall has been set to. `ahead`: the machine has started again, and another clock
        counts from now on."""
        self.now += ahead
        saved = self.captain.saved() if with_notes else None
        for machine in self.machines.values():
            machine.connected = False
            machine.inbox.clear()
        self.place.asked.clear()
        self.place.by += "+"
        self.captain = Captain(self.plan, "run", LEASE, self.now, wall or self.now, saved, self.copies, ahead)

    def place_is_lost(self) -> None:
        self.place = Place()
        self.place.origin = self.plan.snapshots.origin

    # ---- members

    def join(self, host: str) -> None:
        machine = self.machines[host]
        if machine.connected or machine.finished:
            return
        machine.connected = True
        machine.inbox.clear()
        machine.lease_from = self.now
        running = {name: process.attempt for name, process in machine.processes.items()}
        idle = [name for name in self._tasks_of(host) if name not in running]
        self.tell(
            ev.Joined(
                host,
                machine.instance,
                machine.agent,
                machine.replaces,
                machine.place,
                machine.generation,
                running,
                tuple(e for n, e in machine.exits.items() if n in idle),
                {name: f"h:{name}" for name in idle},
                tuple(saved for _, saved in sorted(machine.held.items())),
                dict(machine.follows),
                tuple(machine.unnoted.values()),
                machine.data,
            )
        )

    def join_all(self) -> None:
        for host in self.machines:
            self.join(host)

    def disconnect(self, host: str) -> None:
        machine = self.machines[host]
        if machine.connected:
            machine.connected = False
            machine.inbox.clear()
            self.tell(ev.Disconnected(host))

    def agent_dies(self, host: str) -> None:
        machine = self.machines[host]
        machine.processes.clear()
        machine.exits.clear()
        machine.stored.clear()
        machine.follows.clear()
        machine.agent += 1
        self.disconnect(host)

    def host_is_replaced(self, host: str, dead: bool, same_place: bool = False) -> None:
        """`dead`: the backend vouches for all earlier instances; else the old one runs on until its lease ends.

        `same_place`: it is where the instance before was, which is gone therefore.
        """
        old = self.machines[host]
        self.disconnect(host)
        if dead or same_place:
            self.ghosts = [ghost for ghost in self.ghosts if ghost.host != host]
        elif old.processes:
            self.ghosts.append(old)
        self._instances += 1
        self.machines[host] = Machine(
            host, f"{host}-{self._instances}", replaces=dead, place=old.place if same_place else str(self._instances)
        )

    def deliver(self, host: str) -> None:
        machine = self.machines[host]
        while machine.connected and machine.inbox:
            instruction = machine.inbox.popleft()
            if isinstance(instruction, ev.End):
                self._end(machine, instruction)
            elif isinstance(instruction, ev.Finish):
                machine.processes.clear()
                machine.finished = True
                self.tell(ev.Left(host))
            elif isinstance(instruction, ev.Say):
                self._hear(machine, instruction.message)
            else:
                self._start(machine, *instruction)

    def deliver_all(self) -> None:
        for _ in range(20):
            self.answer()
            for host in list(self.machines):
                self.deliver(host)

    def answer(self) -> None:
        """The place answers what it was asked."""
        while self.place.asked:
            self.answer_one()

    def answer_one(self) -> None:
        request = self.place.asked.popleft()
        self.tell(ev.Answered(request, self.place.answer(request)))

    def save(self, task: str, step: int, parts: int = 1, **metrics: float) -> None:
        host = next(t.host for t in self.plan.tasks if t.name == task)
        machine = self.machines[host]
        process = machine.processes.get(task)
        if process is None:
            return
        saved = ev.Saved(host, task, Id(step, process.generation), parts, metrics)
        machine.held[task, saved.id] = saved
        if machine.connected:
            self.tell(saved)

    def follow(self, task: str) -> None:
        """It asks for its first snapshot."""
        machine = self._machine_of(task)
        if task in machine.processes and task not in machine.follows:
            machine.follows[task] = None
            if machine.connected:
                self.tell(ev.Follows(machine.host, task))

    def evaluate(self, task: str, **metrics: float) -> Id | None:
        """It is done with what it has, and wants the next."""
        machine = self._machine_of(task)
        id = machine.follows.get(task)
        if id is not None and id not in machine.unnoted:
            told = machine.unnoted[id] = ev.Evaluated(machine.host, task, id, metrics)
            self.evaluated.append(id)
            if machine.connected:
                self.tell(told)
        return id

    def _machine_of(self, task: str) -> Machine:
        return self.machines[next(t.host for t in self.plan.tasks if t.name == task)]

    def _hear_of_evaluation(self, machine: Machine, message: dict[str, Any]) -> None:
        task, id = message.get("task"), message["snapshot"] and Id(*message["snapshot"])
        if message["type"] == "noted":
            machine.unnoted.pop(id, None)
            for name in [name for name, has in machine.follows.items() if has == id]:
                machine.follows[name] = None
                self.tell(ev.Follows(machine.host, name))
        elif task in machine.follows and machine.follows[task] is None:
            if id is None:
                del machine.follows[task]
                self.no_more.append(task)
                self.exit(task, "")
            elif id in self.place.damaged:
                told = machine.unnoted[id] = ev.Evaluated(machine.host, task, id, {}, f"{id} is damaged")
                machine.follows[task] = id
                self.tell(told)
            else:
                assert self.place.snapshots.has(id), "what is to be evaluated is gone"
                machine.follows[task] = id

    def _hear(self, machine: Machine, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind in ("evaluate", "noted"):
            self._hear_of_evaluation(machine, message)
            return
        if message["snapshot"] is None:
            machine.prepared, machine.restored = int(message["generation"]), None
            self.tell(ev.Prepared(machine.host, None))
            return
        id = Id(*message["snapshot"])
        if kind == "send" and (message["task"], id) in machine.held:
            files = (File("state", 1, "0" * 64),)
            error = self.place.fails or self.place.read_only
            if message["anew"] or (message["task"], id) not in machine.stored:
                if error is None:
                    machine.stored.add((message["task"], id))
                    self.place.sent.add((message["task"], id))
            else:
                error = None
            self.tell(ev.Stored(machine.host, message["task"], id, () if error else files, error))
        elif kind == "drop":
            machine.held.pop((message["task"], id), None)
            machine.stored.discard((message["task"], id))
        elif kind == "prepare":
            error = self.place.fails
            if id in self.place.damaged:
                error = {"kind": self.place.damage, "text": f"{id} is damaged", "passing": False}
            machine.restored = None if error else id
            machine.prepared = 0 if error else int(message["generation"])
            self.tell(ev.Prepared(machine.host, id, error))
        elif kind == "committed":
            machine.shown = id

    def _tasks_of(self, host: str) -> tuple[str, ...]:
        first = self.plan.ingest_task
        return (*self.plan.host(host).tasks, *([INGEST] if first is not None and first.host == host else []))

    def _start(
        self, machine: Machine, generation: int, tasks: dict[str, int], restore: Id | None, data: str = ""
    ) -> None:
        trains = [name for name in tasks if name != INGEST]
        needs = bool(trains) and self.plan.ingest is not None
        assert not needs or (self.data_is_there and data == "/data/fingerprint"), "a task began without its data"
        machine.data = data or machine.data
        restores = [t for t in self.plan.tasks if t.name in tasks and t.rank >= 0]
        if restores:
            assert restore is None or machine.restored == restore, "a task began without its snapshot"
            counted = [id for id in self.place.snapshots.known().counted() if id.generation < generation]
            newest = next((id for id in counted if id not in self.place.damaged), None)
            assert restore == newest, "a task began from another snapshot than the newest"
            prepared = machine.prepared == generation or not self.plan.snapshots.watch
            assert prepared, "a task began before its folder was put back"
        machine.generation = max(machine.generation, generation)
        for name, attempt in tasks.items():
            assert name not in machine.processes, "a task was started twice on one host"
            machine.processes[name] = Process(attempt, generation, None, self.now, self.now)
            self.started.append((name, generation))
            self.tell(ev.Started(machine.host, name, attempt, 1, False))

    def _end(self, machine: Machine, end: ev.End) -> None:
        for name, attempt in end.tasks.items():
            if name in machine.processes and machine.processes[name].attempt == attempt:
                del machine.processes[name]
                machine.follows.pop(name, None)
                machine.exits[name] = ev.Exit(name, attempt, expected=True)
        offers = {name: f"h:{name}" for name in self._tasks_of(machine.host) if name not in machine.processes}
        self.tell(ev.Ended(machine.host, end.tasks, offers))

    def exit(self, task: str, cause: str = "signal", place: str = "", survivor: bool = False) -> None:
        """A task ends by itself."""
        host = next(host for host in self.machines if task in self._tasks_of(host))
        machine = self.machines[host]
        process = machine.processes.pop(task, None)
        machine.follows.pop(task, None)
        if process is None:
            return
        if task == INGEST and not cause:
            made, self.data_is_there, machine.data = not self.data_is_there, True, "/data/fingerprint"
            if machine.connected:
                self.tell(ev.Ingested(host, "there", machine.data, "run", made, 3, 1000))
        gone = ev.Exit(
            task, process.attempt, 1 if cause else 0, None, False, cause, f"{cause} of {task}", place, survivor
        )
        machine.exits[task] = gone
        if machine.connected:
            self.tell(ev.Exited(host, gone))
            offers = {name: f"h:{name}" for name in self._tasks_of(host) if name not in machine.processes}
            self.tell(ev.Ended(host, {}, offers))

    def step(self, step: int, tasks: list[str] | None = None) -> None:
        for machine in self.machines.values():
            for name, process in machine.processes.items():
                if tasks is None or name in tasks:
                    process.step, process.step_at, process.output_at = step, self.now, self.now
        self.beat_all()

    def output(self) -> None:
        for machine in self.machines.values():
            for process in machine.processes.values():
                process.output_at = self.now

    def beat_all(self) -> None:
        for machine in self.machines.values():
            if machine.connected and not machine.finished:
                machine.lease_from = self.now
                progress = {
                    name: ev.Progress(p.step, self.now - p.step_at, self.now - p.output_at)
                    for name, p in machine.processes.items()
                }
                self.tell(ev.Beat(machine.host, progress))

    # ---- time

    def pass_time(self, seconds: float) -> None:
        """Members keep their leases, or end their tasks themselves, as real ones do."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for machine in [*self.machines.values(), *self.ghosts]:
                if machine.processes and self.now - machine.lease_from > LEASE and not machine.connected:
                    for name, process in machine.processes.items():
                        machine.exits[name] = ev.Exit(name, process.attempt, expected=True)
                    machine.processes.clear()
                    machine.follows.clear()
            self.beat_all()
            self.tell(ev.Tick())
            self.answer()

    # ---- what is true

    def running(self) -> list[tuple[str, Process]]:
        """Every process there is, those on lost hosts included."""
        everyone = [*self.machines.values(), *self.ghosts]
        return [(name, process) for machine in everyone for name, process in machine.processes.items()]

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def last(self, kind: str) -> dict[str, Any]:
        return next(fields for name, _, fields in reversed(self.events) if name == kind)

    @property
    def is_over(self) -> bool:
        return self.captain.phase == OVER


def up(plan: Plan, copies: bool = False) -> World:
    """A world in which the first generation runs; with its data, where the job makes any."""
    world = World(plan, copies)
    world.join_all()
    world.deliver_all()
    if plan.ingest is not None:
        world.exit(INGEST, "")
        world.deliver_all()
    return world
