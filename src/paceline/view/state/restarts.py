"""The restarts of a run in detail: what caused each, with the traceback, the stacks and the place in the output."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.view.output import log_blocks, log_windows
from paceline.view.output.log_windows import Query
from paceline.view.state.events import Event, started_tasks

KINDS = (
    "task-exited", "stacks", "restart", "generation-formed", "recovered", "ingest-started", "ingest-skipped",
    "ingest-done",
)  # fmt: skip
_TRACEBACK = "Traceback (most recent call last):"
_LINES = 300  # before the exit of a task in which a traceback is searched
_LONGEST = 64 * 1024  # characters of a traceback
_MOST = 1000  # restarts
_MOST_UNRESOLVED = 20


def details(events: Iterable[Event], logs: Path, is_over: bool = False) -> list[dict[str, Any]]:
    """The newest restarts, oldest first. `events`: of the history of the run, oldest first. `logs`: the folder of its
    logs. `is_over`: what no generation has followed is no restart."""
    restarts: deque[tuple[Event, dict[str, Any]]] = deque(maxlen=_MOST)
    unresolved: deque[dict[str, Any]] = deque(maxlen=_MOST_UNRESOLVED)  # no generation has started from them yet
    last: dict[str, dict[str, Any]] = {}  # by task
    count = 0
    exits: dict[str, str] = {}
    stacks: dict[str, str] = {}
    for event in events:
        if event.kind == "task-exited":
            code = event.get("code")
            exits[event.text("task")] = event.text("signal") or (f"exit {code}" if code is not None else "lost")
        elif event.kind == "stacks":
            stacks[event.text("task")] = event.text("text")
        elif event.kind == "restart":
            count += 1
            restart = _restart(count, event, exits, stacks)
            restarts.append((event, restart))
            unresolved.append(restart)
            last[event.text("task")] = restart
            exits, stacks = {}, {}
        elif started := set(started_tasks(event)):
            for restart in [each for each in unresolved if not started.isdisjoint(each["scope"])]:
                restart["restore"] = event.get("restore")
                unresolved.remove(restart)
        elif event.kind == "recovered" and event.text("task") in last:
            last[event.text("task")]["first_step_after_s"] = event.get("first_step_after_s")
    uncounted = [id(restart) for restart in unresolved] if is_over else []
    counted = [(event, restart) for event, restart in restarts if id(restart) not in uncounted]
    for event, restart in counted:
        task = event.text("task")
        position, restart["traceback"] = _in_log(logs, task, event) if task else (None, None)
        restart["log"] = None if position is None else {"task": task, "position": position}
    return [restart for _, restart in counted]


def _restart(number: int, event: Event, exits: dict[str, str], stacks: dict[str, str]) -> dict[str, Any]:
    task = event.text("task")
    return {
        "number": number, "at": event.at, "cause": event.text("cause"), "task": task, "detail": event.text("detail"),
        "generation": event.generation, "scope": event.names("scope"), "restore": None, "first_step_after_s": None,
        "exit": exits.get(task), "traceback": None,
        "stacks": [{"task": each, "text": text} for each, text in stacks.items()], "log": None,
    }  # fmt: skip


def _in_log(logs: Path, task: str, event: Event) -> tuple[int | None, str | None]:
    """The position of the end of the task's output before the restart, and its last traceback there."""
    path = logs / f"{task}.log"
    if "/" in task or not path.exists():
        return None, None
    try:
        end = log_blocks.position_at(path, event.at)
        window = log_windows.read(path, Query(position=end, backward=True, limit=_LINES, is_final=True))
    except OSError:
        return None, None
    lines = [line.text for line in window.lines if line.generation == event.generation]
    begins = [number for number, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    return end, "\n".join(lines[begins[-1] :])[:_LONGEST] if begins else None
