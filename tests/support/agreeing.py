"""The real code of tasks that agree on a common step, connected to the captain of a simulated world. Without threads: a
task that waits lets the others continue."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.runtime import group_save, report
from support.worlds import World


class AgreeingTasks:
    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """They have called `should_save` once."""
        self.world = world
        self._hosts = {task.name: task.host for task in world.plan.tasks}
        self._agreements = {name: group_save._Agreement() for name in self._hosts}
        self._ends = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for name in self._hosts}
        for end in (end for ends in self._ends.values() for end in ends):
            end.setblocking(False)
        self.saves: dict[str, list[int]] = {name: [] for name in self._hosts}  # the steps
        self.stopping: list[bool] = []  # what `is_stopping` is when a task saves
        self.messages: list[str] = []  # all that have arrived, of both directions
        self.lost = ""  # the connection of the last host breaks at the first message of this kind, which is lost
        self.while_waiting: deque[Callable[[], None]] = deque()  # what happens while a task waits, then time passes
        self.on_wait: Callable[[float], None] = self._pass_time
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(group_save, "select", SimpleNamespace(select=self._select))
        monkeypatch.setattr(group_save, "time", SimpleNamespace(monotonic=lambda: world.now))
        for task in self._hosts:
            self.call(task, 0)
        self.announce()

    def announce(self) -> None:
        """The heartbeats that tell the captain which tasks call `should_save`."""
        for task, host in self._hosts.items():
            self.world.tell(ev.Heartbeat(host, 1, {}, asking=(task,)))

    def close(self) -> None:
        for end in (end for ends in self._ends.values() for end in ends):
            end.close()

    def call(self, task: str, step: int) -> bool:
        agreement = self._agreements[task]
        with self._monkeypatch.context() as patch:
            patch.setattr(report, "_descriptor", self._ends[task][1].fileno())
            is_saving = agreement.should_save(step)
        if is_saving:
            self.saves[task].append(step)
            self.stopping.append(agreement.is_stopping)
        return is_saving

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for task in self._hosts:
                self.pass_messages()
                self.call(task, step)
            self.pass_messages()

    def pass_messages(self) -> None:
        while any(self._pass_on(task) for task in self._hosts):
            pass

    def hear(self, task: str) -> None:
        """Messages from the captain reach this task's host, and no others."""
        machine = self.world.machines[self._hosts[task]]
        kept = [each for each in machine.inbox if not isinstance(each, ins.AgreeOnStep)]
        messages = [each.words for each in machine.inbox if isinstance(each, ins.AgreeOnStep) and task in each.tasks]
        machine.inbox.clear()
        machine.inbox.extend(kept)
        for each in messages:
            if self._arrives(task, each["say"]):
                self._ends[task][0].send(json.dumps(each).encode())

    def answer(self, task: str) -> bool:
        """Messages from this task reach the captain. Returns whether there are any."""
        replies = [message for message in self._read_all(self._ends[task][0]) if message.get("_") == "agree"]
        for message in replies:
            if self._arrives(task, message["say"]):
                host = self._hosts[task]
                numbers = message["which"], message["count"], message.get("step", 0)
                self.world.tell(ev.AgreementReply(host, task, message["say"], *numbers))
        return bool(replies)

    def reconnect(self, host: str) -> None:
        self.world.disconnect(host)
        self.world.join(host)

    def lose_unread(self, task: str) -> None:
        """Messages that this task has not read are lost, although its host is connected."""
        self._read_all(self._ends[task][1])

    def _pass_on(self, task: str) -> bool:
        has_messages = any(isinstance(each, ins.AgreeOnStep) for each in self.world.machines[self._hosts[task]].inbox)
        self.hear(task)
        return self.answer(task) or has_messages

    def _arrives(self, task: str, say: str) -> bool:
        host = self._hosts[task]
        is_lost = not self.world.machines[host].connected
        if say == self.lost and task == list(self._hosts)[-1]:
            is_lost, self.lost = True, ""
            self.reconnect(host)
        if not is_lost:
            self.messages.append(say)
        return not is_lost

    def _read_all(self, end: socket.socket) -> list[dict[str, Any]]:
        messages = []
        while True:
            try:
                messages.append(json.loads(end.recv(4096)))
            except BlockingIOError:
                return messages

    def _select(self, *arguments: Any) -> None:
        if self.while_waiting:
            self.while_waiting.popleft()()
        else:
            self.on_wait(arguments[-1])

    def _pass_time(self, seconds: float) -> None:
        self.world.now += seconds
