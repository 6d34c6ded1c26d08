"""A simulated world around a captain, without sockets: members with leases, queued messages, hosts that may fail."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import OVER
from paceline.agent.captain.state_machine import Captain
from paceline.agent.captain_process.saved_notes import SAVE_EVERY
from paceline.agent.options import SHARED_FOLDER
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import Porter
from paceline.frameworks.environment import task_variables
from paceline.plan import (
    ALONE,
    GROUP,
    HOST,
    INGEST,
    LEAD,
    VERSION,
    WARN,
    Elastic,
    ElasticHosts,
    Host,
    Ingest,
    Limits,
    Plan,
    Restart,
    Role,
    Task,
    cluster,
)
from paceline.plan import Snapshots as Settings
from paceline.storage.snapshots.manifest import File, SnapshotId, parse, parse_id
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.protocol import ContinueCheck, Sent

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
    on_nan: str = WARN,
    least: int | None = None,
    first: int | None = None,
    wait: float = 30.0,
    every: float = 120.0,
    scope: str = GROUP,
) -> Plan:
    """Builds a plan directly: tests of the captain do not need a job file. `least`: the number of worker hosts that are
    needed, if the job is elastic. `first`: the number with which it starts, if it can be scaled to more."""
    roles, hosts, tasks = [], [], []
    counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": evaluator}
    rank = 0
    for name, count in counts.items():
        if not count:
            continue
        alone = name == "evaluator" or (ps and name == "worker")
        restarts = ALONE if alone else LEAD if ps else scope
        decides = name == ("chief" if chief else "worker")
        roles.append(Role(name, ("python", "train.py"), {}, restarts, name in ("chief", "worker"), decides))
        for index in range(0, count, per_host):
            names = tuple(f"{name}-{i}" for i in range(index, min(count, index + per_host)))
            host = f"{name}-host-{index // per_host}"
            hosts.append(Host(host, name, index // per_host, 0, 0, None, None, names))
            for local, task in enumerate(names):
                tasks.append(Task(task, name, index + local, host, local, rank if restarts == scope else -1))
                rank += 1
    framework = "tensorflow" if scope == GROUP else "none"
    strategy = "" if scope != GROUP else "parameter-server" if ps else "multi-worker"
    limits = Limits(start, runtime, 5.0)
    return Plan(
        VERSION, "job", framework, strategy, "/", tuple(roles), tuple(hosts), tuple(tasks),
        Restart(limit, hang_after, True, on_nan=on_nan), limits, Settings(watch=watch),
        Ingest(("python", "ingest.py"), "/data", limit=ingest_limit) if ingest else None,
        elastic=None if least is None else Elastic(wait, every, (ElasticHosts("worker", 0, least, first),)),
    )  # fmt: skip


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> bool:
        return self._objects.setdefault(name, data) is data

    def read(self, name: str, most: int) -> bytes | None:
        return self._objects.get(name)

    def has(self, name: str) -> bool:
        return name in self._objects

    def folders(self, prefix: str) -> list[str]:
        return sorted({name[len(prefix) :].split("/")[0] for name in self.names(prefix)})

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self._objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self._objects.pop(name, None)

    def clear(self, prefix: str) -> None:
        for name in self.names(prefix):
            self.delete(name)

    def send_all(self, files: Sequence[tuple[str, str]], should_continue: ContinueCheck, sent: Sent) -> None:
        for path, name in files:
            data = self._objects[name] = Path(path).read_bytes()
            sent[name] = len(data), hashlib.sha256(data).hexdigest()

    def at_once(self, size: int) -> int:
        return 1

    def fetch(self, name: str, path: str, should_continue: ContinueCheck) -> tuple[int, str]:
        raise NotImplementedError

    def digest(self, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        raise NotImplementedError


def _id(text: str) -> SnapshotId:
    snapshot = parse_id(text)
    assert snapshot is not None
    return snapshot


@dataclass(frozen=True)
class Start:
    """The part of a StartTasks instruction that is sent to one host."""

    generation: int
    tasks: Mapping[str, int]
    restore: SnapshotId | None
    data: str = ""
    records: tuple[ev.GenerationRecord, ...] = ()


@dataclass
class Process:
    attempt: int
    generation: int
    step: int | None = None
    step_at: float = 0.0
    output_at: float = 0.0


@dataclass
class Machine:
    """The actual state of a host, whatever the captain assumes."""

    host: str
    instance: str
    agent: int = 1
    replaces: bool = True
    place: str = ""
    connected: bool = False
    generation: int = 0
    lease_from: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    exits: dict[str, ev.TaskExit] = field(default_factory=dict)
    inbox: deque[ins.MemberInstruction | Start] = field(default_factory=deque)
    finished: bool = False
    held: dict[tuple[str, SnapshotId], ev.PartSaved] = field(default_factory=dict)
    stored: set[tuple[str, SnapshotId]] = field(
        default_factory=set
    )  # parts that this agent has sent and does not send again
    prefetching: ins.PrefetchSnapshot | None = None
    prefetched: SnapshotId | None = None  # the snapshot of which it has the parts of other hosts
    restored: SnapshotId | None = None
    prepared: int = 0  # the generation that the host is prepared for
    sources: dict[str, str] = field(default_factory=dict)  # tasks and the hosts that had their parts
    shown: SnapshotId | None = None  # the newest committed snapshot, shown to evaluators
    follows: dict[str, SnapshotId | None] = field(
        default_factory=dict
    )  # the snapshot that each evaluator evaluates; None: it waits for one
    unnoted: dict[SnapshotId, ev.SnapshotEvaluated] = field(default_factory=dict)  # results not yet acknowledged
    data: str = ""  # the location of the data
    records: tuple[ev.GenerationRecord, ...] = ()
    not_finite: dict[tuple[str, str], ev.MetricNotFinite] = field(default_factory=dict)  # by task and metric


class Place:
    """A location for snapshots that works unless a test makes it fail; requests are queued until it answers."""

    def __init__(self) -> None:
        self.store = Memory()
        self.snapshots = SnapshotRepository(self.store, "run")
        self.asked: deque[tuple[req.Request, int]] = deque()
        self.fails: req.Failure | None = None
        self.read_only: req.Failure | None = None  # the failure of requests that write
        self.by = "captain"
        self.damaged: set[SnapshotId] = set()
        self.damage = "damaged"  # or "newer"
        self.origin = ""

    def send(self, task: str, snapshot: SnapshotId) -> None:
        """A part of the snapshot is sent to the store."""
        self.store.create(f"run/{snapshot}/{task}/state", b"1")

    def has_part(self, task: str, snapshot: SnapshotId) -> bool:
        return bool(self.store.names(f"run/{snapshot}/{task}/"))

    def answer(self, request: req.Request) -> req.Answer:
        if error := self.fails or (None if isinstance(request, req.ListSnapshots) else self.read_only):
            return error
        if isinstance(request, req.CommitSnapshot):
            manifest = parse(request.manifest.encode(), "manifest")
            assert all(self.has_part(part.task, manifest.id) for part in manifest.parts), "a manifest without its files"
        if isinstance(request, req.CheckSnapshot) and self.snapshots.has(request.snapshot):
            is_damaged = request.snapshot in self.damaged
            return req.Failure(self.damage, f"{request.snapshot} is damaged", False) if is_damaged else req.Done()
        porter = Porter(self.snapshots, self.snapshots, lambda *_: None, lanes=(), origin=self.origin)
        return porter.execute(request)


class World:
    def __init__(self, plan: Plan, serves: str = SHARED_FOLDER) -> None:
        """`serves`: how hosts get snapshots from each other; empty: not at all."""
        self.plan = plan
        self.serves = serves
        self.peers_fail: req.Failure | None = None  # the failure of hosts that get snapshots from each other
        self.faulty_hosts: dict[str, str] = {}  # what they say of every snapshot that they get from the store
        self.now = 1000.0
        self.captain: Captain = Captain(plan, "run", LEASE, self.now, self.now, name="captain")
        self.machines = {host.name: Machine(host.name, f"{host.name}-a") for host in plan.hosts}
        self.ghosts: list[Machine] = []  # replaced hosts that still run until their lease ends
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.over: ins.EndRun | None = None
        self.left: str | None = None
        self.place = Place()
        self.place.origin = plan.snapshots.origin
        self.told_committed: list[SnapshotId] = []
        self.prefetches: dict[str, SnapshotId] = {}  # host -> what this captain waits for
        self.evaluated: list[SnapshotId] = []  # in the order in which they were finished
        self.no_more: list[str] = []  # evaluators that have received the last snapshot
        self.released: list[str] = []  # hosts that shut down and need not wait for their group any more
        self.data_is_there = False
        self._instances = self._offers = 0
        self.known_addresses: dict[
            str, dict[str, str]
        ] = {}  # of all tasks, as each task received them, if `restart.scope` is set
        self.started: list[tuple[str, int]] = []  # tasks and their generations in start order
        self.taking_part: set[str] | None = None  # the tasks that train now; None: a captain has lost its notes
        self._saved = self._saved_notes()
        # Tasks that agree on a step (support.polling): when the captain sends a message, when it arrives, and which
        # tasks of a host take part.
        self.on_agreement: Callable[[ins.AgreeOnStep], None] = lambda instruction: None
        self.on_agreement_delivered: Callable[[Machine, ins.AgreeOnStep], None] = lambda machine, instruction: None
        self.asking: Callable[[Machine], tuple[str, ...]] = lambda machine: ()

    # ---- the captain

    def _saved_notes(self) -> tuple[str, tuple[object, ...], float]:
        """The captain's notes, why they were saved, and when: as `CaptainNotes` does."""
        return json.dumps(self.captain.to_notes()), self.captain.milestone(), self.now

    def tell(self, event: ev.Event) -> None:
        instructions = self.captain.handle(event, self.now)
        _, milestone, at = self._saved
        is_due = isinstance(event, ev.Tick) and self.now - at > SAVE_EVERY
        is_starting = any(isinstance(each, ins.StartTasks) for each in instructions)
        if is_due or is_starting or self.captain.milestone() != milestone:
            self._saved = self._saved_notes()
        for instruction in instructions:
            if isinstance(instruction, ins.EmitEvent):
                self.events.append((instruction.kind, instruction.generation, dict(instruction.fields)))
                if instruction.kind == "committed":
                    self.told_committed.append(_id(instruction.fields["snapshot"]))
            elif isinstance(instruction, ins.EndRun):
                self.over = instruction
            elif isinstance(instruction, ins.StepDown):
                self.left = instruction.reason
            elif isinstance(instruction, ins.AskStore):
                self.place.asked.append((instruction.request, instruction.ticket))
            elif isinstance(instruction, ins.StartTasks):
                self._check_group(instruction)
                self._check_variables(instruction)
                for host, tasks in instruction.hosts.items():
                    start = Start(
                        instruction.generation, tasks, instruction.restore, instruction.data, instruction.records
                    )
                    self.machines[host].inbox.append(start)
            else:
                if isinstance(instruction, ins.AgreeOnStep):
                    self.on_agreement(instruction)
                if isinstance(instruction, ins.PrefetchSnapshot) and not instruction.sources:
                    del self.prefetches[instruction.host]
                elif isinstance(instruction, ins.PrefetchSnapshot):
                    assert not self.prefetches, "two hosts fetch in advance at the same time"
                    self.prefetches[instruction.host] = instruction.snapshot
                machine = self.machines[instruction.host]
                machine.inbox.append(instruction)
                if isinstance(instruction, ins.PrepareHost):
                    machine.sources = {task: self._machine_of(task).instance for task in instruction.sources}

    def _check_group(self, start: ins.StartTasks) -> None:
        """Tasks that train together all start at once, on enough hosts, and the roster says which ones they are."""
        started = {name for tasks in start.hosts.values() for name in tasks}
        if self.plan.restart_scope != GROUP:
            self._check_units(started, start)
            return
        if self.plan.strategy == "parameter-server":
            self._check_servers(started, start)
        group = [task for task in self.plan.tasks if task.rank >= 0]
        taking_part = [task for task in group if task.name in started]
        if not taking_part:
            return
        assert [task.name for task in taking_part] == [task.name for task in group if task.name in start.roster]
        dealt = [task for task in self.plan.of_generation(start.roster).tasks if task.rank >= 0]
        assert [task.name for task in dealt] == [task.name for task in taking_part]
        assert [task.rank for task in dealt] == list(range(len(dealt)))
        least = {each.role: each.min for each in self.plan.elastic.hosts} if self.plan.elastic else {}
        for role in {task.role for task in group}:
            hosts = {task.host for task in group if task.role == role}
            count = len({task.host for task in taking_part if task.role == role})
            assert least.get(role, len(hosts)) <= count <= len(hosts)
        assert {task.host for task in taking_part}.isdisjoint(self.captain.ledger.unwanted_hosts)
        for host in {task.host for task in taking_part}:
            assert set(self.plan.host(host).tasks) <= started, "only a part of a host takes part"

    def _check_variables(self, start: ins.StartTasks) -> None:
        """Each task can be given its variables. An evaluator, too, is told which tasks train now."""
        started = [name for tasks in start.hosts.values() for name in tasks if name != INGEST]
        if not started:
            return
        plan = self.plan.of_generation(start.roster)
        variables = {name: task_variables(plan, plan.task(name), start.roster, "run", 1, 0) for name in started}
        training = {task.name for _, tasks in cluster(plan) for task in tasks}
        is_group = any(self.plan.role(plan.task(name).role).restarts in (GROUP, LEAD) for name in started)
        if is_group:
            self.taking_part = training
        assert self.taking_part in (None, training), "the tasks that train are others"
        if self.plan.world_size:
            world_size = sum(self.plan.task(name).rank >= 0 for name in training)
            assert {each["PACELINE_WORLD_SIZE"] for each in variables.values()} <= {str(world_size)} != {"0"}

    def _check_servers(self, started: set[str], start: ins.StartTasks) -> None:
        """The addresses of a whole cluster are known, and those that running tasks were told are still true."""
        tasks = {task.name for _, tasks in cluster(self.plan.of_generation(start.roster)) for task in tasks}
        if started.isdisjoint(tasks):
            return  # an evaluator
        addresses = {name: start.roster[name] for name in tasks}
        assert started & {task.name for task in self.plan.tasks if task.role != "evaluator"} <= tasks
        continues = {name for machine in self.machines.values() for name in machine.processes} - started
        for name in continues & tasks:
            assert self.known_addresses[name] == addresses, "a task that continues received other addresses"
        self.known_addresses.update(dict.fromkeys(started, addresses))

    def _check_units(self, started: set[str], start: ins.StartTasks) -> None:
        """Whole units start, know the addresses of all tasks, and what other tasks were told is still true."""
        training = [task for task in self.plan.tasks if task.rank >= 0]
        if started.isdisjoint(task.name for task in training):
            return  # an evaluator
        addresses = {task.name: start.roster[task.name] for task in training}
        if self.plan.restart_scope == HOST:
            for host in {task.host for task in training if task.name in started}:
                assert set(self.plan.host(host).tasks) <= started, "only a part of a host starts"
        continues = {name for machine in self.machines.values() for name in machine.processes} - started
        for name in continues & addresses.keys():
            assert self.known_addresses[name] == addresses, "a task that continues received other addresses"
        self.known_addresses.update(dict.fromkeys(started, addresses))

    def restart_captain(
        self,
        with_notes: bool = True,
        wall: float = 0.0,
        ahead: float = 0.0,
        answers_are_lost: bool = False,
        stale: bool = False,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """`wall`: the new time of the wall clock. `ahead`: the machine was rebooted, and the monotonic clock differs by
        this much. `answers_are_lost`: the store carries out what the previous captain has requested. `stale`: the notes
        are those that the previous captain had saved, some seconds ago. `notes`: others."""
        self.now += ahead
        newest = json.loads(self._saved[0]) if stale else self.captain.to_notes()
        saved = dict(notes or newest) if with_notes else None
        self.taking_part = self.taking_part if with_notes else None
        for machine in self.machines.values():
            machine.connected = False
            machine.inbox.clear()
        for request, _ in self.place.asked if answers_are_lost else ():
            self.place.answer(request)
        self.place.asked.clear()
        self.prefetches.clear()
        self.place.by += "+"
        self.captain = Captain(self.plan, "run", LEASE, self.now, wall or self.now, saved, ahead, self.place.by)
        self._saved = self._saved_notes()

    def scale(self, hosts: int) -> None:
        """A user requests this many worker hosts, and the backend starts those that have left."""
        self.tell(ev.ScaleRequested("worker", hosts))
        self._start_wanted_hosts()

    def _start_wanted_hosts(self) -> None:
        for host, machine in list(self.machines.items()):
            is_wanted = host not in self.captain.ledger.unwanted_hosts and not self.captain.ledger.is_held
            if machine.finished and is_wanted and not self.is_over:
                self.host_is_replaced(host, dead=True)

    def pause(self, within: float = 600.0, now: bool = False, releases: bool = True) -> None:
        """A user requests that the run is paused. `releases`: as on one machine; otherwise as on a cluster, which ends
        the hosts."""
        self.tell(ev.PauseRequested(within, now, releases))

    def resume(self) -> None:
        """A user requests that it continues, and the backend starts the hosts that have left."""
        self.tell(ev.ResumeRequested())
        self._start_wanted_hosts()

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
        self.prefetches.pop(host, None)
        machine.lease_from = self.now
        running = {name: process.attempt for name, process in machine.processes.items()}
        idle = [name for name in self._tasks_of(host) if name not in running]
        self.tell(
            ev.MemberJoined(
                host,
                machine.instance,
                machine.agent,
                machine.replaces,
                machine.place,
                machine.generation,
                running,
                tuple(e for n, e in machine.exits.items() if n in idle),
                {name: self._offer(name) for name in idle},
                tuple(saved for _, saved in sorted(machine.held.items())),
                dict(machine.follows),
                tuple(machine.unnoted.values()),
                machine.data,
                machine.records,
                self.serves,
                tuple(machine.not_finite.values()),
            )
        )

    def join_all(self) -> None:
        for host in self.machines:
            self.join(host)

    def _offer(self, task: str) -> str:
        """The address at which the host would start the task next: another each time."""
        self._offers += self.plan.restart_scope != GROUP
        return f"h:{task}:{self._offers}" if self._offers else f"h:{task}"

    def disconnect(self, host: str) -> None:
        machine = self.machines[host]
        if machine.connected:
            machine.connected = False
            machine.inbox.clear()
            self.prefetches.pop(host, None)
            self.tell(ev.MemberDisconnected(host))

    def agent_dies(self, host: str) -> None:
        machine = self.machines[host]
        machine.processes.clear()
        machine.exits.clear()
        machine.stored.clear()
        machine.follows.clear()
        machine.not_finite.clear()
        machine.prefetching = machine.prefetched = None
        machine.agent += 1
        self.disconnect(host)

    def host_is_replaced(self, host: str, dead: bool, same_place: bool = False) -> None:
        """`dead`: the backend guarantees that all earlier instances have ended; otherwise the old one runs until its
        lease ends.

        `same_place`: it runs where the previous instance ran, which therefore has ended.
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
            if isinstance(instruction, ins.EndTasks):
                self._end(machine, instruction)
            elif isinstance(instruction, ins.DismissMember):
                machine.processes.clear()
                machine.finished = True
                self.tell(ev.MemberLeft(host))
            elif isinstance(instruction, Start):
                self._start(machine, instruction)
            else:
                self._handle(machine, instruction)

    def deliver_all(self) -> None:
        for _ in range(20):
            self.answer()
            for host in list(self.machines):
                self.deliver(host)
                self.finish_prefetch(host)

    def finish_prefetch(self, host: str) -> None:
        """The host has what it was told to fetch in advance, unless those that had it have deleted it meanwhile."""
        machine = self.machines[host]
        message, machine.prefetching = machine.prefetching, None
        if message is None:
            return
        is_gone = any((task, message.snapshot) not in self._machine_of(task).held for task in message.sources)
        gone = req.Failure(req.DAMAGED, "does not have it", False) if is_gone else None
        error = self.peers_fail or gone
        machine.prefetched = message.snapshot if error is None else None
        self._report_prefetched(machine, message.snapshot, error)

    def _report_prefetched(self, machine: Machine, snapshot: SnapshotId, error: req.Failure | None) -> None:
        if machine.connected:
            if self.prefetches.get(machine.host) == snapshot:
                del self.prefetches[machine.host]
            self.tell(ev.SnapshotPrefetched(machine.host, snapshot, error))

    def answer(self) -> None:
        """The store answers all queued requests."""
        while self.place.asked:
            self.answer_one()

    def answer_one(self) -> None:
        request, ticket = self.place.asked.popleft()
        self.tell(ev.StoreAnswered(request, self.place.answer(request), ticket))

    def report(self, task: str, step: int | None, metric: str = "loss", value: str = "NaN") -> None:
        """A metric is not finite: the host sends this once for an attempt."""
        machine = self.machines[next(host for host in self.machines if task in self._tasks_of(host))]
        process = machine.processes.get(task)
        if process is None or getattr(machine.not_finite.get((task, metric)), "attempt", 0) == process.attempt:
            return
        event = ev.MetricNotFinite(machine.host, task, process.attempt, metric, value, step)
        machine.not_finite[task, metric] = event
        if machine.connected:
            self.tell(event)

    def save(self, task: str, step: int, parts: int = 1, **metrics: float) -> None:
        host = next(t.host for t in self.plan.tasks if t.name == task)
        machine = self.machines[host]
        process = machine.processes.get(task)
        if process is None:
            return
        saved = ev.PartSaved(host, task, SnapshotId(step, process.generation), parts, metrics)
        if (task, saved.snapshot) in machine.held:
            return  # the same step again: the first one may be being sent
        machine.held[task, saved.snapshot] = saved
        if machine.connected:
            self.tell(saved)

    def follow(self, task: str) -> None:
        """The evaluator asks for its first snapshot."""
        machine = self._machine_of(task)
        if task in machine.processes and task not in machine.follows:
            machine.follows[task] = None
            if machine.connected:
                self.tell(ev.EvaluatorWaiting(machine.host, task))

    def evaluate(self, task: str, **metrics: float) -> SnapshotId | None:
        """The evaluator has finished its snapshot and asks for the next."""
        machine = self._machine_of(task)
        id = machine.follows.get(task)
        if id is not None and id not in machine.unnoted:
            result = machine.unnoted[id] = ev.SnapshotEvaluated(machine.host, task, id, metrics)
            self.evaluated.append(id)
            if machine.connected:
                self.tell(result)
        return id

    def _machine_of(self, task: str) -> Machine:
        return self.machines[next(t.host for t in self.plan.tasks if t.name == task)]

    def _acknowledge(self, machine: Machine, snapshot: SnapshotId) -> None:
        machine.unnoted.pop(snapshot, None)
        for name in [name for name, current in machine.follows.items() if current == snapshot]:
            machine.follows[name] = None
            self.tell(ev.EvaluatorWaiting(machine.host, name))

    def _assign(self, machine: Machine, task: str, snapshot: SnapshotId | None) -> None:
        if task not in machine.follows or machine.follows[task] is not None:
            return
        if snapshot is None:
            del machine.follows[task]
            self.no_more.append(task)
            self.exit(task, "")
        elif snapshot in self.place.damaged:
            error = f"{snapshot} is damaged"
            result = machine.unnoted[snapshot] = ev.SnapshotEvaluated(machine.host, task, snapshot, {}, error)
            machine.follows[task] = snapshot
            self.tell(result)
        else:
            assert self.place.snapshots.has(snapshot), "the snapshot to be evaluated does not exist"
            machine.follows[task] = snapshot

    def _handle(self, machine: Machine, message: ins.MemberInstruction) -> None:
        if isinstance(message, ins.AcknowledgeEvaluation):
            self._acknowledge(machine, message.snapshot)
        elif isinstance(message, ins.EvaluateSnapshot):
            self._assign(machine, message.task, message.snapshot)
        elif isinstance(message, ins.PrepareHost) and message.snapshot is None:
            machine.prepared, machine.restored = message.generation, None
            self.tell(ev.HostPrepared(machine.host, None))
        elif isinstance(message, ins.StorePart):
            self._store(machine, message)
        elif isinstance(message, ins.DropPart):
            machine.held.pop((message.task, message.snapshot), None)
            machine.stored.discard((message.task, message.snapshot))
        elif isinstance(message, ins.PrepareHost):
            is_fetched = machine.prefetched == message.snapshot  # then no other host is asked
            is_remote = any(message.sources.values())
            peers_fail = self.peers_fail if is_remote and not is_fetched else None
            error = peers_fail if message.sources else self.place.fails
            are_there = all(self._is_still_there(task, instance) for task, instance in machine.sources.items())
            if not is_fetched and not are_there:
                error = req.Failure(req.STORE, "a host that has a part is gone", True)  # since this was sent
            for task, address in message.sources.items() if error is None else ():
                self._check_source(machine, task, address, message.snapshot)
            if message.snapshot in self.place.damaged and not message.sources:
                error = req.Failure(self.place.damage, f"{message.snapshot} is damaged", False)
            elif machine.host in self.faulty_hosts and not message.sources:
                error = req.Failure(self.faulty_hosts[machine.host], "its SHA-256 differs", False)
            if machine.prefetching is not None and machine.prefetching.snapshot != message.snapshot:
                self._cancel_prefetch(machine)
            machine.restored = None if error else message.snapshot
            machine.prepared = 0 if error else message.generation
            if not message.sources:
                machine.prefetched = None
            elif is_remote and error is None:
                machine.prefetched = message.snapshot
            self.tell(ev.HostPrepared(machine.host, message.snapshot, error, bool(message.sources)))
        elif isinstance(message, ins.PrefetchSnapshot):
            self._prefetch(machine, message)
        elif isinstance(message, ins.AnnounceCommit):
            machine.shown = message.snapshot
        elif isinstance(message, ins.AgreeOnStep):
            self.on_agreement_delivered(machine, message)
        elif isinstance(message, ins.ReleaseHost):
            self.released.append(machine.host)

    def _prefetch(self, machine: Machine, message: ins.PrefetchSnapshot) -> None:
        assert self.serves not in ("", SHARED_FOLDER), "there is nothing to fetch"
        for task, address in message.sources.items():
            assert self._machine_of(task) is not machine and address == self.serves, "the address of another host"
        if machine.prefetching is None or machine.prefetching.snapshot != message.snapshot:
            self._cancel_prefetch(machine)
            machine.prefetching = message if message.sources else None
            if message.sources:
                machine.prefetched = None

    def _cancel_prefetch(self, machine: Machine) -> None:
        message, machine.prefetching = machine.prefetching, None
        if message is not None:
            self._report_prefetched(machine, message.snapshot, req.Failure(req.UNWANTED, "canceled", False))

    def _is_still_there(self, task: str, instance: str) -> bool:
        holder = self._machine_of(task)
        return holder.connected and holder.instance == instance

    def _check_source(self, machine: Machine, task: str, address: str, snapshot: SnapshotId) -> None:
        """A host gets a part from itself, or from a host that serves its parts, unless it has fetched that already."""
        holder = self._machine_of(task)
        is_fetched = holder is not machine and machine.prefetched == snapshot
        assert is_fetched or (task, snapshot) in holder.held, f"{holder.host} does not have its part of {snapshot}"
        is_shared = self.serves == SHARED_FOLDER or holder is machine
        assert address == ("" if is_shared else self.serves), "the address of another host"

    def _store(self, machine: Machine, message: ins.StorePart) -> None:
        part = message.task, message.snapshot
        if part not in machine.held:
            return
        error = self.place.fails or self.place.read_only
        if message.anew or part not in machine.stored:
            if error is None:
                machine.stored.add(part)
                self.place.send(*part)
        else:
            error = None
        files = () if error else (File("state", 1, "0" * 64),)
        self.tell(ev.PartStored(machine.host, *part, files, error))

    def _tasks_of(self, host: str) -> tuple[str, ...]:
        first = self.plan.ingest_task
        return (*self.plan.host(host).tasks, *([INGEST] if first is not None and first.host == host else []))

    def _start(self, machine: Machine, start: Start) -> None:
        generation, tasks, restore, data = start.generation, start.tasks, start.restore, start.data
        trains = [name for name in tasks if name != INGEST]
        needs_data = bool(trains) and self.plan.ingest is not None
        assert not needs_data or (self.data_is_there and data == "/data/fingerprint"), "a task began without its data"
        machine.data = data or machine.data
        restores = [t for t in self.plan.tasks if t.name in tasks and t.rank >= 0]
        if restores:
            assert restore is None or machine.restored == restore, "a task began without its snapshot"
            self._check_restored(restore, generation)
            is_prepared = machine.prepared == generation or not self.plan.snapshots.watch
            assert is_prepared, "a task began before its folder was restored"
        machine.generation = max(machine.generation, generation)
        machine.records = start.records or machine.records
        for name, attempt in tasks.items():
            assert name not in machine.processes, "a task was started twice on one host"
            machine.processes[name] = Process(attempt, generation, None, self.now, self.now)
            self.started.append((name, generation))
            self.tell(ev.TaskStarted(machine.host, name, attempt, 1, False))

    def _check_restored(self, restore: SnapshotId | None, generation: int) -> None:
        """Tasks resume from a snapshot that is at least as new as the newest committed one. If their record is not
        written yet, another captain may have committed a newer one: then they will be restarted."""
        inventory = self.place.snapshots.inventory()
        if generation not in inventory.records:
            return
        if self.plan.restart_scope != GROUP:
            return  # a unit that restarts while others continue begins no generation
        earlier = [id for id in inventory.current() if id.generation < generation]
        newest = next((id for id in earlier if id not in self.place.damaged), None)
        if restore is None or restore in earlier:
            assert restore == newest, "a task began from another snapshot than the newest"
        else:
            assert newest is None or restore.step > newest.step, "a task began from an older snapshot than the newest"

    def _end(self, machine: Machine, end: ins.EndTasks) -> None:
        for name, attempt in end.tasks.items():
            if name in machine.processes and machine.processes[name].attempt == attempt:
                del machine.processes[name]
                machine.follows.pop(name, None)
                machine.exits[name] = ev.TaskExit(name, attempt, expected=True)
        offers = {name: self._offer(name) for name in self._tasks_of(machine.host) if name not in machine.processes}
        self.tell(ev.TasksEnded(machine.host, end.tasks, offers))

    def exit(
        self,
        task: str,
        cause: str = "signal",
        place: str = "",
        survivor: bool = False,
        ran: float = 0.0,
        to_first_output: float = 0.0,
        checkpoint: str = "",
        listened: bool | None = None,
    ) -> None:
        """A task ends on its own."""
        host = next(host for host in self.machines if task in self._tasks_of(host))
        machine = self.machines[host]
        process = machine.processes.pop(task, None)
        machine.follows.pop(task, None)
        if process is None:
            return
        if task == INGEST and not cause:
            is_new, self.data_is_there, machine.data = not self.data_is_there, True, "/data/fingerprint"
            if machine.connected:
                self.tell(ev.IngestProgress(host, "there", machine.data, "run", is_new, 3, 1000))
        task_exit = ev.TaskExit(
            task, process.attempt, 1 if cause else 0, None, False, cause, f"{cause} of {task}", place, survivor,
            ran=ran, to_first_output=to_first_output, checkpoint=checkpoint, listened=listened,
        )  # fmt: skip
        machine.exits[task] = task_exit
        if machine.connected:
            self.tell(ev.TaskExited(host, task_exit))
            offers = {name: self._offer(name) for name in self._tasks_of(host) if name not in machine.processes}
            self.tell(ev.TasksEnded(host, {}, offers))

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
                    name: ev.TaskProgress(p.step, self.now - p.step_at, self.now - p.output_at)
                    for name, p in machine.processes.items()
                }
                self.tell(ev.Heartbeat(machine.host, 1, progress, asking=self.asking(machine)))

    # ---- time

    def pass_time(self, seconds: float) -> None:
        """Members renew their leases, or end their tasks when the lease expires, as real members do."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for machine in [*self.machines.values(), *self.ghosts]:
                if machine.processes and self.now - machine.lease_from > LEASE and not machine.connected:
                    for name, process in machine.processes.items():
                        machine.exits[name] = ev.TaskExit(name, process.attempt, expected=True)
                    machine.processes.clear()
                    machine.follows.clear()
            self.beat_all()
            self.tell(ev.Tick())
            self.answer()

    # ---- the actual state

    def running(self) -> list[tuple[str, Process]]:
        """Every running process, including those on lost hosts."""
        machines = [*self.machines.values(), *self.ghosts]
        return [(name, process) for machine in machines for name, process in machine.processes.items()]

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def last(self, kind: str) -> dict[str, Any]:
        return next(fields for name, _, fields in reversed(self.events) if name == kind)

    @property
    def is_over(self) -> bool:
        return self.captain.phase == OVER


def up(plan: Plan, serves: str = SHARED_FOLDER) -> World:
    """A world in which the first generation runs; if the job has an ingest step, its data exists."""
    world = World(plan, serves)
    world.join_all()
    world.deliver_all()
    if plan.ingest is not None:
        world.exit(INGEST, "")
        world.deliver_all()
    return world
