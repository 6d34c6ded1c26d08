"""Tasks of a simulated world that call `should_save` once per step, with the code of the runtime but without waiting,
and what must hold whenever they and their captain agree on a step."""

from __future__ import annotations

from typing import Any

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.state_machine import Captain
from paceline.runtime import group_save
from support.worlds import Machine, Process, World


class PollingTask(group_save._Agreement):
    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self.is_waiting = False
        self.replies: list[dict[str, Any]] = []  # that its agent has not read yet
        self.accepted: set[int] = set()  # proposals

    def call(self, step: int) -> bool:
        """Like `should_save`. A task that waits does so until a later call."""
        if not self.is_waiting:
            self.count += 1
        has_reached = self.save_at is not None and self.count >= self.save_at
        self.is_waiting = has_reached and not self.is_agreed
        if not has_reached or self.is_waiting:
            return False
        self.save_at, self.is_agreed, self.saved = None, False, (self.proposal, step)
        self._reply("saves", self.proposal, step=step)
        return True

    def be_late(self) -> None:
        self._reply("late", self.proposal)

    def _reply(self, kind: str, proposal: int, **fields: Any) -> None:
        if kind == "yes":
            self.accepted.add(proposal)
        self.replies.append({"say": kind, "which": proposal, "count": self.count, **fields})


class PollingTasks:
    def __init__(self, world: World) -> None:
        self._world = world
        self._tasks: dict[str, PollingTask] = {}
        self._proposed: dict[int, tuple[Captain, int]] = {}  # which captain has proposed it, and the call
        self.saves: dict[int, set[int]] = {}  # by proposal: the calls at which tasks have saved
        self._training = {task.name for task in world.plan.tasks if task.rank >= 0 or task.role == "chief"}
        world.on_agreement, world.on_agreement_delivered, world.asking = self._check, self._deliver, self._asking

    def names(self) -> list[str]:
        machines = self._world.machines.values()
        return sorted(name for machine in machines for name in machine.processes if name in self._training)

    def waiting(self) -> list[str]:
        return [name for name in self.names() if self._task(name).is_waiting]

    def call(self, name: str, step: int) -> None:
        task = self._task(name)
        if task.call(step):
            self.saves.setdefault(task.proposal, set()).add(task.count)

    def be_late(self, name: str) -> None:
        self._task(name).be_late()

    def answer(self, name: str) -> None:
        """Its agent reads its replies, and sends them if it is connected."""
        task, machine = self._task(name), self._world._machine_of(name)
        replies, task.replies = task.replies, []
        for each in replies if machine.connected else ():
            numbers = each["which"], each["count"], each.get("step", 0)
            self._world.tell(ev.AgreementReply(machine.host, name, each["say"], *numbers))

    def _task(self, name: str) -> PollingTask:
        """Of its current process."""
        process = self._world._machine_of(name).processes[name]
        if name not in self._tasks or self._tasks[name].process is not process:
            self._tasks[name] = PollingTask(process)
        return self._tasks[name]

    def _asking(self, machine: Machine) -> tuple[str, ...]:
        names = sorted(self._training & machine.processes.keys())
        return tuple(name for name in names if self._task(name).count)

    def _deliver(self, machine: Machine, instruction: ins.AgreeOnStep) -> None:
        for name in instruction.tasks:
            if name in machine.processes:
                self._task(name)._handle(dict(instruction.words))

    def _check(self, instruction: ins.AgreeOnStep) -> None:
        """Whenever the captain says something."""
        captain, message = self._world.captain, instruction.words
        proposal = message["which"]
        assert proposal < 2**53
        if message["say"] == "at":
            proposed = self._proposed.setdefault(proposal, (captain, message["count"]))
            assert proposed == (captain, message["count"]), "one number for two proposals"
        elif message["say"] == "go":
            proposed_by, count = self._proposed[proposal]
            assert proposed_by is captain, "a captain confirms what another one has proposed"
            for name in instruction.tasks:
                self._check_accepted(name, proposal, count)

    def _check_accepted(self, name: str, proposal: int, count: int) -> None:
        task, process = self._tasks.get(name), self._world._machine_of(name).processes.get(name)
        if task is None or task.process is not process:
            return  # the process that has accepted it is dead, and the captain does not know that yet
        assert proposal in task.accepted, f"{name} has not accepted the proposal"
        if task.saved is None or task.saved[0] != proposal:
            assert (task.proposal, task.save_at) == (proposal, count) and task.count <= count, f"{name} has passed it"
