"""The Python stacks of tasks, for the user: tasks that do the same are shown once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from paceline.agent.net.frames import WireError
from paceline.agent.stack_messages import MOST_SECONDS, PER_SECOND, Frame, StacksTaken
from paceline.agent.tasks.tracebacks import library_file
from paceline.errors import SCHEMA_VERSION

# Of a process. A captain may send anything, and few bytes can stand for many samples of deep stacks.
MOST_THREADS, MOST_SAMPLES, DEEPEST = 500, 2 * int(MOST_SECONDS * PER_SECOND), 500
MOST_RANGES = 8  # of tasks, in the heading of a group
_IMPORT_SYSTEM = "<frozen importlib."  # several frames for each import, which are of no use
_NUMBERED = re.compile(r"(.*)-(\d+)")

Stack = tuple[Frame, ...]  # innermost first


@dataclass(frozen=True)
class ThreadStacks:
    """A thread of a task."""

    native_id: int
    """Its id on its host; that of the main thread is the process id."""
    is_main: bool
    """Whether it is the main thread."""
    samples: tuple[Stack, ...]
    """Its stacks, oldest first. A stack is a tuple of frames (`file`, `line`, `function`), innermost first."""
    seconds: float
    """The time that the samples stand for."""

    @property
    def stack(self) -> Stack:
        """The last sample."""
        return self.samples[-1]

    def to_dict(self) -> dict[str, Any]:
        """An item of `threads` of `paceline stacks -o json`, with a `schema_version`."""
        return {"schema_version": SCHEMA_VERSION, **self.fields()}

    def fields(self) -> dict[str, Any]:
        """The same as `to_dict`, without `schema_version`."""
        return {"id": self.native_id, "main": self.is_main, "frames": [vars(frame) for frame in self.stack]}


@dataclass(frozen=True)
class ProcessStacks:
    """The threads of one process of a task."""

    task: str
    """The name of the task. A task may have several processes."""
    pid: int = 0
    """Its process id on its host; 0: unknown."""
    threads: tuple[ThreadStacks, ...] = ()
    """Its threads, the main thread first."""
    problem: str = ""
    """Why there are no threads."""

    @property
    def main(self) -> Stack:
        """The stack of the main thread; that of another one if it could not be taken."""
        return next((thread.stack for thread in self.threads if thread.is_main), self.threads[0].stack)

    def to_dict(self) -> dict[str, Any]:
        """An item of `tasks` of `paceline stacks -o json`, with a `schema_version`."""
        return {"schema_version": SCHEMA_VERSION, **self.fields()}

    def fields(self) -> dict[str, Any]:
        """The same as `to_dict`, without `schema_version`."""
        threads = [thread.fields() for thread in self.threads]
        return {"task": self.task, "pid": self.pid or None, "problem": self.problem, "threads": threads}


def read(taken: StacksTaken) -> ProcessStacks:
    """WireError: an index is out of range, or there is more than a member sends."""
    depth = max(map(len, taken.stacks), default=0)
    samples = max((len(thread.samples) for thread in taken.threads), default=0)
    if len(taken.threads) > MOST_THREADS or samples > MOST_SAMPLES or depth > DEEPEST:
        raise WireError("stacks: too many threads, samples or frames")
    try:
        stacks = [tuple(taken.frames[_index(number)] for number in stack) for stack in taken.stacks]
        threads = tuple(
            ThreadStacks(
                thread.native_id,
                thread.native_id == taken.pid,
                tuple(stacks[_index(number)] for number in thread.samples),
                thread.seconds,
            )
            for thread in taken.threads
            if thread.samples
        )
        threads = tuple(thread for thread in threads if all(thread.samples))
    except IndexError:
        raise WireError("stacks: an index is out of range") from None
    problem = taken.problem or ("" if threads else "it has no Python threads")
    return ProcessStacks(taken.task, taken.pid, threads, problem)


def _index(number: int) -> int:
    if number < 0:
        raise IndexError
    return number


# ---- text


def describe(processes: Sequence[ProcessStacks]) -> Iterator[str]:
    """Lines: a block for each group of tasks that do the same, in the order of their first tasks."""
    pids = _pids_to_show(processes)
    for group in groups(processes):
        first = group[0]
        name = task_ranges([process.task for process in group])
        if len(group) == 1 and first.pid in pids:
            name += f" (pid {first.pid})"
        if not first.threads:
            yield f"{name}: no stacks: {first.problem}"
            continue
        yield f"{name}: {location(first.main)}"
        for label, stack in _threads(first):
            yield f"  {label}"
            for frame in stack:
                if not frame.file.startswith(_IMPORT_SYSTEM):
                    yield f"    {frame_text(frame)}"


def groups(processes: Sequence[ProcessStacks]) -> list[list[ProcessStacks]]:
    by_stacks: dict[Any, list[ProcessStacks]] = {}
    for process in processes:
        others = frozenset(thread.stack for thread in process.threads if not thread.is_main)
        key = (process.main, others) if process.threads else process.problem
        by_stacks.setdefault(key, []).append(process)
    return list(by_stacks.values())


def location(stack: Stack) -> str:
    """Where the user's code is: the innermost frame that does not belong to a library, and what it has called."""
    own = next((frame for frame in stack if not library_file(frame.file)), None)
    if own is None:
        return frame_text(stack[0])
    text = f"{PurePath(own.file).name}:{own.line} in {own.function}"
    return text if own is stack[0] else f"{text}, in {frame_text(stack[0])}"


def frame_text(frame: Frame) -> str:
    return f"{library_file(frame.file) or frame.file}:{frame.line or '?'} in {frame.function}"


def task_ranges(tasks: Sequence[str]) -> str:
    """`tasks`: one for each process.

    >>> task_ranges(["worker-0", "worker-1", "worker-2", "chief-0"])
    'worker-0 .. worker-2, chief-0 (4 tasks)'
    """
    names = list(dict.fromkeys(tasks))
    counts = [f"{len(names)} tasks"] if len(names) > 1 else []
    counts += [f"{len(tasks)} processes"] if len(tasks) > len(names) else []
    ranges: list[list[str]] = []
    for name in names:
        if ranges and _follows(ranges[-1][-1], name):
            ranges[-1].append(name)
        else:
            ranges.append([name])
    texts = [each[0] if len(each) == 1 else f"{each[0]} .. {each[-1]}" for each in ranges]
    shown = ", ".join(texts[:MOST_RANGES]) + (", ..." if len(texts) > MOST_RANGES else "")
    return f"{shown} ({', '.join(counts)})" if counts else shown


def _follows(name: str, next_name: str) -> bool:
    one, two = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(next_name)
    return bool(one and two and one[1] == two[1] and int(two[2]) == int(one[2]) + 1)


def _threads(process: ProcessStacks) -> Iterator[tuple[str, Stack]]:
    """The main thread first; other threads with equal stacks are shown once."""
    others: dict[Stack, int] = {}
    for thread in process.threads:
        if thread.is_main:
            yield "main thread", thread.stack
        else:
            others[thread.stack] = others.get(thread.stack, 0) + 1
    for stack, count in others.items():
        yield "1 thread" if count == 1 else f"{count} threads", stack


def _pids_to_show(processes: Iterable[ProcessStacks]) -> set[int]:
    """Of tasks with several processes."""
    by_task: dict[str, set[int]] = {}
    for process in processes:
        by_task.setdefault(process.task, set()).add(process.pid)
    return {pid for pids in by_task.values() if len(pids) > 1 for pid in pids}
