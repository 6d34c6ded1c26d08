"""Has tasks of a host profiled, and moves their files to the folder of TensorBoard files: see runtime/profiling.py.

Tasks may write anything to the folder that they are given. Only regular files with the suffix of a profile are taken,
within a limit, and the agent gives them their names.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Callable

from paceline.agent.net.loop import Loop, Timer
from paceline.agent.profile_messages import FINISH_WITHIN, FOLDER, MOST_BYTES, ProfileTaken, TakeProfile
from paceline.agent.tasks.attempt import Attempt, is_small_integer, text_of
from paceline.agent.transfers.host_snapshots import REMOVED
from paceline.storage.local_files import remove_tree
from paceline.storage.tensorboard_event_files import find

SUFFIXES = (".pt.trace.json", ".trace.json.gz", ".xplane.pb")
MOST_FILES = 16  # of a task
FIRST_STEP_WITHIN = 30.0  # seconds in which a task that has not reported any step reports one
LOOK_EVERY = 0.25  # seconds
LATE = 1.0  # seconds after the limit for a message of the task to arrive
NO_STEPS = (
    "it has reported no steps: programs report them with paceline.report(step=...), `step` of a helper or Paceline's "
    "Keras callback"
)
_SESSION = re.compile(r"[0-9_]{1,40}")


class Refused(Exception):
    """The files of a task are not taken; the text is the reason."""


@dataclass
class _Awaited:
    """A task that is asked for a profile."""

    attempt: Attempt
    folder: str  # that it writes to
    has_reported: bool  # steps, before it was asked
    has_started: bool = False
    has_ended_late: bool = False  # after this agent has given it up


class ProfileCollector:
    def __init__(
        self,
        host: str,
        framework: str,
        folder: str,
        loop: Loop,
        attempts: Mapping[str, Attempt],
        redact: Callable[[str], str],
        send: Callable[[ProfileTaken], None],
        remove: Callable[[Iterable[str]], None],
    ) -> None:
        """`folder`: that of the run. `attempts`: the running ones, which change. `remove`: deletes folders of tasks,
        which may contain anything, without delay for the agent."""
        self._host, self._framework, self._folder, self._loop = host, framework, folder, loop
        self._attempts, self._redact, self._send, self._remove = attempts, redact, send, remove
        self._current: TakeProfile | None = None
        self._began = 0.0
        self._awaited: dict[str, _Awaited] = {}
        self._asked: set[str] = set()  # tasks that were asked for a profile, since this agent started
        self._timer: Timer | None = None  # of the next look

    def take(self, message: TakeProfile) -> None:
        if self._current is not None or not _SESSION.fullmatch(message.session):
            for number, task in enumerate(message.tasks, 1):
                problem, is_last = "another profile is being taken", number == len(message.tasks)
                self._send(ProfileTaken(self._host, message.request, task, problem, last=is_last))
            return
        self._current, self._began = message, self._loop.now()
        problems = {}
        for task in message.tasks:
            problem = self._ask(task, message)
            if problem:
                problems[task] = problem
        for task, problem in problems.items():
            self._reply(task, problem, is_last=not self._awaited and task == list(problems)[-1])
        self._look()

    def _ask(self, task: str, message: TakeProfile) -> str:
        """Why the task cannot be profiled; empty: it was asked."""
        attempt = self._attempts.get(task)
        if attempt is None or attempt.exited:
            return "it is not running"
        if not attempt.pid:
            return "it is starting"
        folder = f"{self._folder}/{_prefix(task)}{message.session}"
        leftovers = [path for path in self._folders_of(task) if not path.endswith(REMOVED)]
        self._remove(leftovers)  # of an earlier agent, or of a profile that was discarded
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:
            return f"its agent cannot create a folder: {error.strerror}"
        awaited = self._awaited[task] = _Awaited(attempt, folder, attempt.step is not None)
        self._asked.add(task)
        attempt.on_profile = lambda reply: self._on_message(awaited, message.request, reply)
        until = self._began + message.seconds  # the clock is that of the machine, the same in all its processes
        attempt.tell(
            {
                "say": "profile", "request": message.request, "framework": self._framework, "steps": message.steps,
                "until": until, "discard_after": until + FINISH_WITHIN, "folder": folder,
            }
        )  # fmt: skip
        return ""

    def _on_message(self, awaited: _Awaited, request: int, message: dict[str, Any]) -> None:
        """`request`: the one for which the task was asked."""
        task = awaited.attempt.task.name
        if message.get("request") != request:
            return
        stage, steps = message.get("stage"), message.get("steps", 0)
        if self._awaited.get(task) is not awaited:
            if stage in ("done", "failed", "discarded") and not awaited.has_ended_late:
                awaited.has_ended_late = True  # a task may send this without end
                self._remove([awaited.folder])  # its profiler may have created it again
        elif stage == "started":
            awaited.has_started = True
        elif stage == "failed":
            error = self._redact(text_of(message.get("error")))
            self._finish(task, f"the profiler failed: {' '.join(error.split())}")
        elif stage == "done":
            self._collect(task, awaited, max(0, steps) if is_small_integer(steps) else 0)

    def _collect(self, task: str, awaited: _Awaited, steps: int) -> None:
        assert self._current is not None
        try:
            files = move_files(awaited.folder, f"{self._folder}/tensorboard", self._current.session, task)
        except Refused as refused:
            self._finish(task, str(refused))
            return
        except OSError as error:
            self._finish(task, f"its files cannot be moved: {error.strerror}")
            return
        wanted, problem = self._current, ""
        if steps < wanted.steps:
            problem = f"it completed {steps} of {wanted.steps} steps within {wanted.seconds:g} s"
        self._finish(task, problem, steps, files)

    def _look(self) -> None:
        """Ends what takes too long, and what no longer runs."""
        if self._current is None:
            return
        elapsed, limit = self._loop.now() - self._began, self._current.seconds
        for task, awaited in list(self._awaited.items()):
            attempt = awaited.attempt
            if attempt.exited or self._attempts.get(task) is not attempt:
                self._finish(task, "it ended or was restarted" + (" while it was profiled" * awaited.has_started))
            elif awaited.has_started:
                if elapsed > limit + FINISH_WITHIN:
                    self._finish(task, f"its profile was not complete {FINISH_WITHIN:g} s after the limit")
            elif not awaited.has_reported and attempt.step is None and elapsed > min(limit, FIRST_STEP_WITHIN):
                self._finish(task, NO_STEPS)
            elif elapsed > limit + LATE:
                self._finish(task, f"it completed no step within {limit:g} s")
        if self._current is not None:
            self._timer = self._loop.after(LOOK_EVERY, self._look)

    def _finish(self, task: str, problem: str, steps: int = 0, files: Mapping[str, int] | None = None) -> None:
        awaited = self._awaited.pop(task)
        self._remove([awaited.folder])
        self._reply(task, problem, steps, files, is_last=not self._awaited)

    def _reply(
        self, task: str, problem: str, steps: int = 0, files: Mapping[str, int] | None = None, is_last: bool = False
    ) -> None:
        assert self._current is not None
        taken = ProfileTaken(self._host, self._current.request, task, problem, steps, files or {}, is_last)
        if is_last:
            self._current = None
            if self._timer is not None:
                self._timer.cancel()
        self._send(taken)

    def _folders_of(self, task: str) -> list[str]:
        """Those that the task writes to, and those that are being removed."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        prefix = _prefix(task)
        return [f"{self._folder}/{name}" for name in names if name.startswith((prefix, f".{prefix}"))]

    def close(self) -> None:
        """When this host leaves, and its tasks have ended: removes what is left of their profiles."""
        if self._timer is not None:
            self._timer.cancel()
        for folder in (folder for task in self._asked for folder in self._folders_of(task)):
            if os.path.islink(folder):
                with contextlib.suppress(OSError):
                    os.unlink(folder)
            else:
                remove_tree(folder, ignore_errors=True)


def move_files(folder: str, tensorboard: str, session: str, task: str) -> dict[str, int]:
    """Moves what a task has written to the folder of this profile; returns the new paths, with their sizes."""
    if os.path.islink(folder):
        raise Refused("it has replaced the folder of its profile")
    sizes = {path: size for path, (_, size) in find(folder).items() if path.endswith(SUFFIXES)}
    total = sum(sizes.values())
    if not sizes:
        raise Refused("its profiler wrote no files")
    if total > MOST_BYTES or len(sizes) > MOST_FILES:
        size = f"{len(sizes)} files with {total >> 20} MiB"
        raise Refused(f"its profile has {size}, the limit is {MOST_FILES} with {MOST_BYTES >> 20} MiB: use fewer steps")
    os.makedirs(f"{tensorboard}/{FOLDER}/{session}", exist_ok=True)
    moved: dict[str, int] = {}
    for path in sorted(sizes):
        target = _target(path, session, task, moved)
        os.rename(f"{folder}/{path}", f"{tensorboard}/{target}")
        status = os.lstat(f"{tensorboard}/{target}")
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:  # it was replaced in the meantime
            os.unlink(f"{tensorboard}/{target}")
            raise Refused("it has changed the files of its profile")
        moved[target] = status.st_size
    return moved


def _target(path: str, session: str, task: str, taken: Mapping[str, int]) -> str:
    """TensorBoard shows what is before the suffix as the host, or with torch's plugin as the worker; that requires a
    number before the suffix."""
    suffix = next(suffix for suffix in SUFFIXES if path.endswith(suffix))
    number = f".{time.time_ns()}" if suffix == SUFFIXES[0] else ""
    names = (f"{FOLDER}/{session}/{task}{more}{number}{suffix}" for more in ("", *(f"-{n}" for n in range(1, 100))))
    return next(name for name in names if name not in taken)


def _prefix(task: str) -> str:
    return f".profile-{task}-"
