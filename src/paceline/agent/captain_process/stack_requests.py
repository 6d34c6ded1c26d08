"""Requests of users for the stacks of tasks: passed on to members, whose replies are sent to the user as they come.

Replies are not read here, apart from the fields that say whose they are: a thousand hosts reply at the same time, and
one reply may have thousands of samples. The command line checks them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Callable

from paceline.agent.net import messages
from paceline.agent.net.frames import Message, WireError, encode
from paceline.agent.net.loop import Loop
from paceline.agent.stacks import ANSWER_WITHIN, MOST_SECONDS, StacksTaken, TakeStacks
from paceline.plan import INGEST, Plan

REPLY = "stacks"  # type of the messages of members
END = {"type": "stacks-end"}
MOST_REQUESTS = 16  # at once


@dataclass
class _Open:
    reply: Callable[[bytes], None]
    missing: dict[str, set[str]]  # host -> tasks for which it has not replied


class StackRequests:
    def __init__(self, plan: Plan, loop: Loop, send: Callable[[str, TakeStacks], bool]) -> None:
        """`send`: sends a message to a host; False: it is not connected."""
        self._loop, self._send = loop, send
        tasks = [*plan.tasks, *([] if plan.ingest_task is None else [plan.ingest_task])]
        self._host_of = {task.name: task.host for task in tasks}
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def begin(self, message: Message, reply: Callable[[bytes], None]) -> None:
        """`reply`: sends frames to the user. WireError: not a valid request."""
        tasks, seconds = _read(message)
        tasks = tasks or [name for name in self._host_of if name != INGEST]
        if len(self._open) >= MOST_REQUESTS or not all(task in self._host_of for task in tasks):
            raise WireError("too many requests, or unknown tasks")
        request = next(self._numbers)
        missing: dict[str, set[str]] = {}
        for task in tasks:
            missing.setdefault(self._host_of[task], set()).add(task)
        self._open[request] = _Open(reply, missing)
        for host, names in list(missing.items()):
            if not self._send(host, TakeStacks(request, tuple(sorted(names)), seconds)):
                self._give_up(request, host, "its host is not connected to the captain")
        self._loop.after(seconds + ANSWER_WITHIN, lambda: self._on_deadline(request))
        self._end_if_complete(request)

    def on_reply(self, host: str, message: Message) -> None:
        """`message`: of the type REPLY. WireError: not a reply of this host."""
        request, task, is_last = message.get("request"), message.get("task"), message.get("last", False)
        if not isinstance(request, int) or not isinstance(is_last, bool) or not isinstance(task, str):
            raise WireError("a reply with stacks without a valid request, task or last")
        if self._host_of.get(task) != host:
            raise WireError(f"stacks of another host's task: {task!r}")
        current = self._open.get(request)
        if current is None or host not in current.missing:
            return
        current.missing[host].discard(task)
        current.reply(encode(message))
        if is_last:
            del current.missing[host]
            self._end_if_complete(request)

    def _on_deadline(self, request: int) -> None:
        if request in self._open:
            for host in list(self._open[request].missing):
                self._give_up(request, host, "its host has not replied")
            self._end_if_complete(request)

    def _give_up(self, request: int, host: str, problem: str) -> None:
        current = self._open[request]
        for task in sorted(current.missing.pop(host)):
            current.reply(encode(messages.member_message(StacksTaken(host, request, task, problem))))

    def _end_if_complete(self, request: int) -> None:
        if not self._open[request].missing:
            self._open.pop(request).reply(encode(END))


def _read(message: Message) -> tuple[list[str], float]:
    tasks: Any = message.get("tasks", [])
    seconds: Any = message.get("seconds", 0)
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise WireError("tasks: not a list of names")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= MOST_SECONDS:
        raise WireError(f"seconds: not a number from 0 to {MOST_SECONDS:g}")
    return list(dict.fromkeys(tasks)), float(seconds)
