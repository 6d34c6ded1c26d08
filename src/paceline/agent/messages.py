"""Messages as the captain knows them: each field is checked before it becomes an event, so nothing odd gets further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.agent import events as ev
from paceline.agent.wire import PROTOCOL, Message, WireError

TEXT_LIMIT = 64 * 1024
MANY = 100_000


def join(run: str, joined: ev.Joined) -> Message:
    return {"type": "join", "protocol": PROTOCOL, "run": run, **asdict(joined)}


def read_join(message: Message, run: str) -> ev.Joined:
    if message.get("protocol") != PROTOCOL:
        raise WireError(f"protocol {message.get('protocol')!r} is not {PROTOCOL}")
    if message.get("run") != run:
        raise WireError(f"this is run {run}")
    exits = message.get("exits")
    if not isinstance(exits, list) or len(exits) > MANY:
        raise WireError("join: exits is no list")
    return ev.Joined(
        host=_text(message, "host"),
        instance=_text(message, "instance"),
        agent=_number(message, "agent"),
        replaces=bool(message.get("replaces")),
        place=_text({"place": "", **message}, "place"),
        generation=_number(message, "generation"),
        running=_numbers(message, "running"),
        exits=tuple(read_exit(item) for item in exits),
        offers=_texts(message, "offers"),
        snapshots=_steps(message),
    )


def read_exit(data: Any) -> ev.Exit:
    if not isinstance(data, dict):
        raise WireError("exit: not an object")
    code = data.get("code")
    signal = data.get("signal")
    return ev.Exit(
        task=_text(data, "task"),
        attempt=_number(data, "attempt"),
        code=None if code is None else _number(data, "code"),
        signal=None if signal is None else _text(data, "signal"),
        expected=bool(data.get("expected")),
        cause=_text(data, "cause"),
        detail=_text(data, "detail"),
        place=_text(data, "place"),
        survivor=bool(data.get("survivor")),
        age=_seconds(data.get("age")),
    )


def read_member(message: Message, host: str) -> ev.Told | None:
    """What a joined member says; None for a kind this captain does not know (a newer agent may say more)."""
    kind = message["type"]
    if kind == "beat":
        return _read_beat(message, host)
    if kind == "started":
        pid, attempt = _number(message, "pid"), _number(message, "attempt")
        return ev.Started(host, _text(message, "task"), attempt, pid, bool(message.get("warm")))
    if kind == "spare":
        return ev.SpareReady(host, _seconds(message.get("seconds")))
    if kind == "exited":
        return ev.Exited(host, read_exit(message.get("exit")))
    if kind == "ended":
        return ev.Ended(
            host, _numbers(message, "tasks"), _texts(message, "offers"), _steps(message),
            _texts(message, "states"), _texts(message, "stacks"),
        )  # fmt: skip
    if kind == "leaving":
        return ev.Leaving(host, _text(message, "reason"))
    if kind == "said":
        return ev.Said(host, _text(message, "text"), bool(message.get("warning")))
    if kind == "left":
        return ev.Left(host)
    return None


def _read_beat(message: Message, host: str) -> ev.Beat:
    tasks = message.get("tasks")
    if not isinstance(tasks, dict) or len(tasks) > MANY:
        raise WireError("beat: tasks is no object")
    memory = message.get("memory", 0.0)
    if not isinstance(memory, (int, float)) or not 0 <= memory < 1000:
        raise WireError("beat: memory is no share")
    return ev.Beat(host, {name: _progress(data) for name, data in tasks.items()}, float(memory), _steps(message))


def _progress(data: Any) -> ev.Progress:
    if not isinstance(data, list) or len(data) != 4 or not isinstance(data[3], dict):
        raise WireError("beat: a task's progress is not [step, step age, output age, metrics]")
    step = data[0]
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or abs(step) > 2**53):
        raise WireError("beat: step is no number")
    metrics = {str(name): float(value) for name, value in data[3].items() if _is_finite(value)}
    return ev.Progress(step, _seconds(data[1]), _seconds(data[2]), metrics)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _steps(message: Mapping[str, Any]) -> tuple[int, ...]:
    steps = message.get("snapshots", [])
    if not isinstance(steps, list) or len(steps) > MANY or not all(isinstance(step, int) for step in steps):
        raise WireError("snapshots is no list of steps")
    return tuple(steps)


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > TEXT_LIMIT:
        raise WireError(f"{name} is no text, or too long")
    return value


def _number(message: Mapping[str, Any], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 2**53:
        raise WireError(f"{name} is no number")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise WireError("an age is no number of seconds")
    return float(value)


def _texts(message: Mapping[str, Any], name: str) -> dict[str, str]:
    value = message.get(name, {})
    if not isinstance(value, dict) or len(value) > MANY or not all(isinstance(v, str) for v in value.values()):
        raise WireError(f"{name} is no object of texts")
    return value


def _numbers(message: Mapping[str, Any], name: str) -> dict[str, int]:
    value = message.get(name, {})
    if not isinstance(value, dict) or len(value) > MANY or not all(type(v) is int for v in value.values()):
        raise WireError(f"{name} is no object of numbers")
    return value
