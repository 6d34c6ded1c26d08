"""Requests of users for stacks or profiles of tasks: passed on to members, whose replies are sent on as they come.

Replies are not read here, apart from the fields that say whose they are: a thousand hosts reply at the same time, and
one reply may have thousands of samples. The command line checks them. Only their size and nesting are limited: what
neither the captain nor the command line could encode or read would end the replies of other hosts, too."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, Callable, Union

from paceline.agent import profile_messages, stack_messages
from paceline.agent.net import messages
from paceline.agent.net.frames import MEMBER_LIMIT, Message, WireError, encode
from paceline.agent.net.loop import Loop
from paceline.agent.net.task_request import REFUSED, end_type
from paceline.agent.profile_messages import ProfileTaken, TakeProfile
from paceline.agent.stack_messages import StacksTaken, TakeStacks
from paceline.plan import INGEST, Plan
from paceline.storage.json_values import is_deep

KINDS = ("stacks", "profile")  # types of requests, and of replies
MOST_REQUESTS = 16  # at once

Instruction = Union[TakeStacks, TakeProfile]


@dataclass
class _Open:
    message: Message
    reply: Callable[[bytes], None]
    missing: dict[str, set[str]]  # host -> tasks for which it has not replied
    remaining: dict[str, int]  # task -> how many more replies its host may send


class TaskRequests:
    def __init__(self, plan: Plan, loop: Loop, send: Callable[[str, Instruction], bool]) -> None:
        """`send`: sends a message to a host; False: it is not connected."""
        self._plan, self._loop, self._send = plan, loop, send
        tasks = [*plan.tasks, *([] if plan.ingest_task is None else [plan.ingest_task])]
        self._host_of = {task.name: task.host for task in tasks}
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def begin(self, message: Message, reply: Callable[[bytes], None]) -> float:
        """The seconds within which the request is complete. `reply`: sends frames to the user. WireError: not a valid
        request."""
        tasks, (instruction, limit) = _tasks(message), _instruction(message)
        tasks = tasks or self._default_tasks(message)
        if len(self._open) >= MOST_REQUESTS or not all(task in self._host_of for task in tasks):
            raise WireError("too many requests, or unknown tasks")
        if message["type"] == "profile" and any(each.message["type"] == "profile" for each in self._open.values()):
            reply(encode({"type": REFUSED, "reason": "another profile of this run is being taken"}))
            return limit
        request = next(self._numbers)
        missing: dict[str, set[str]] = {}
        for task in tasks:
            missing.setdefault(self._host_of[task], set()).add(task)
        most = 1 if message["type"] == "profile" else stack_messages.MOST_PROCESSES
        self._open[request] = _Open(message, reply, missing, dict.fromkeys(tasks, most))
        for host, names in list(missing.items()):
            if not self._send(host, instruction(request, tuple(sorted(names)))):
                self._give_up(request, host, "its host is not connected to the captain")
        self._loop.after(limit, lambda: self._on_deadline(request))
        self._end_if_complete(request)
        return limit

    def on_reply(self, host: str, message: Message) -> None:
        """`message`: of one of the types KINDS. WireError: not a reply of this host."""
        request, task, is_last = message.get("request"), message.get("task"), message.get("last", False)
        if not isinstance(request, int) or not isinstance(is_last, bool) or not isinstance(task, str):
            raise WireError(f"a reply with {message['type']} without a valid request, task or last")
        if self._host_of.get(task) != host:
            raise WireError(f"{message['type']} of another host's task: {task!r}")
        if is_deep(message):
            raise WireError(f"a reply with {message['type']} is nested too deeply")
        current = self._open.get(request)
        if current is None or current.message["type"] != message["type"] or host not in current.missing:
            return
        if not current.remaining.get(task):  # a host without a limit could occupy the captain until the deadline
            self._give_up(request, host, "its host has sent too many replies")
            self._end_if_complete(request)
            return
        current.remaining[task] -= 1
        current.missing[host].discard(task)
        if is_last:
            del current.missing[host]
        current.reply(_encoded(message, host))
        self._end_if_complete(request)

    def on_disconnect(self, host: str) -> None:
        """A host that has lost its connection may still send the stacks of its tasks, but its profile is of processes
        that may have ended with it."""
        for request in [number for number, each in self._open.items() if each.message["type"] == "profile"]:
            if request in self._open and host in self._open[request].missing:
                self._give_up(request, host, "its host has lost its connection to the captain")
                self._end_if_complete(request)

    def _default_tasks(self, message: Message) -> list[str]:
        if message["type"] == "profile":
            return profile_messages.profiled_tasks(self._plan)
        return [name for name in self._host_of if name != INGEST]

    def _on_deadline(self, request: int) -> None:
        if request in self._open:
            for host in list(self._open[request].missing):
                self._give_up(request, host, "its host has not replied")  # may end others, too
            self._end_if_complete(request)

    def _give_up(self, request: int, host: str, problem: str) -> None:
        current = self._open.get(request)
        if current is None:
            return
        kind = ProfileTaken if current.message["type"] == "profile" else StacksTaken
        for task in sorted(current.missing.pop(host, ())):
            current.reply(encode(messages.member_message(kind(host, request, task, problem))))

    def _end_if_complete(self, request: int) -> None:
        current = self._open.get(request)  # None: sending to a host, or the reply, has ended it
        if current is not None and not current.missing:
            del self._open[request]
            current.reply(encode({"type": end_type(current.message)}))


def _instruction(message: Message) -> tuple[Callable[[int, tuple[str, ...]], Instruction], float]:
    """What a host is sent, by the number of the request and its tasks; and the seconds in which it has to reply."""
    if message["type"] == "stacks":
        seconds = _number(message, "seconds", 0, stack_messages.MOST_SECONDS)
        return lambda request, tasks: TakeStacks(request, tasks, seconds), seconds + stack_messages.ANSWER_WITHIN
    steps = int(_number(message, "steps", 1, profile_messages.MOST_STEPS))
    seconds = _number(message, "seconds", 1, profile_messages.MOST_SECONDS)
    session = time.strftime("%Y_%m_%d_%H_%M_%S")  # as frameworks name it
    limit = seconds + profile_messages.FINISH_WITHIN + profile_messages.ANSWER_WITHIN
    return lambda request, tasks: TakeProfile(request, tasks, steps, seconds, session), limit


def _encoded(message: Message, host: str) -> bytes:
    """A reply to send on. Characters that are not ASCII may take more bytes than they did."""
    data = encode(message)
    if len(data) <= MEMBER_LIMIT:
        return data
    kind = ProfileTaken if message["type"] == "profile" else StacksTaken
    taken = kind(host, message["request"], message["task"], "its reply is too long")
    return encode(messages.member_message(taken))


def _tasks(message: Message) -> list[str]:
    tasks: Any = message.get("tasks", [])
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise WireError("tasks: not a list of names")
    return list(dict.fromkeys(tasks))


def _number(message: Message, name: str, least: float, most: float) -> float:
    value: Any = message.get(name, least)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise WireError(f"{name}: not a number from {least:g} to {most:g}")
    return float(value)
