"""Messages as the captain knows them: each field is checked before it becomes an event, so nothing odd gets further."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from paceline.agent import events as ev
from paceline.agent.wire import PROTOCOL, Message, WireError
from paceline.storage.manifest import File, Id, fit, is_digest, pair

TEXT_LIMIT = 64 * 1024
MANY = 100_000
FILES_AT_ONCE = 500  # of a snapshot, in one message: with the longest paths that is less than a message may have


def join(run: str, joined: ev.Joined) -> Message:
    held = [{**saved, "snapshot": list(saved.pop("id").values())} for saved in map(asdict, joined.held)]
    told = [{**each, "snapshot": list(each.pop("id").values())} for each in map(asdict, joined.evaluated)]
    follows = {task: None if id is None else pair(id) for task, id in joined.follows.items()}
    more = {"held": held, "evaluated": told, "follows": follows}
    return {"type": "join", "protocol": PROTOCOL, "run": run, **asdict(joined), **more}


def stored(task: str, id: Id, files: list[Any]) -> Iterator[Message]:
    """All of these files, however many they are."""
    for at in range(0, max(1, len(files)), FILES_AT_ONCE):
        some = files[at : at + FILES_AT_ONCE]
        words = {"task": task, "snapshot": pair(id), "files": some}
        yield {"type": "stored", **words, "at": at, "more": at + FILES_AT_ONCE < len(files)}


def read_join(message: Message, run: str) -> ev.Joined:
    if message.get("protocol") != PROTOCOL:
        raise WireError(f"protocol {message.get('protocol')!r} is not {PROTOCOL}")
    if message.get("run") != run:
        raise WireError(f"this is run {run}")
    exits, held = message.get("exits"), message.get("held")
    if not isinstance(exits, list) or len(exits) > MANY:
        raise WireError("join: exits is no list")
    if not isinstance(held, list) or len(held) > MANY or not all(isinstance(item, dict) for item in held):
        raise WireError("join: held is no list")
    told, follows = message.get("evaluated", []), message.get("follows", {})
    if not isinstance(told, list) or len(told) > MANY or not all(isinstance(item, dict) for item in told):
        raise WireError("join: evaluated is no list")
    if not isinstance(follows, dict) or len(follows) > MANY:
        raise WireError("join: follows is no object")
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
        held=tuple(_saved(item, _text(message, "host")) for item in held),
        follows={task: None if given is None else _id({"snapshot": given}) for task, given in follows.items()},
        evaluated=tuple(_evaluated(item, _text(message, "host")) for item in told),
        data=_text({"data": "", **message}, "data"),
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
            host, _numbers(message, "tasks"), _texts(message, "offers"), _texts(message, "states"),
            _texts(message, "stacks"),
        )  # fmt: skip
    if kind == "saved":
        return _saved(message, host)
    if kind == "stored":
        return _stored(message, host)
    if kind == "prepared":
        id = None if message.get("snapshot") is None else _id(message)
        return ev.Prepared(host, id, _error(message))
    if kind == "ingest":
        return ev.Ingested(
            host, _text(message, "stage"), _text(message, "data"), _text(message, "run"), bool(message.get("made")),
            _number(message, "files"), _number(message, "size"),
        )  # fmt: skip
    if kind == "leaving":
        return ev.Leaving(host, _text(message, "reason"))
    if kind == "said":
        return ev.Said(host, _text(message, "text"), bool(message.get("warning")))
    if kind == "save":
        return ev.SaveNow(host, _text(message, "task"))
    if kind == "agree":
        which, count, step = (_number(message, name) for name in ("which", "count", "step"))
        return ev.Agrees(host, _text(message, "task"), _text(message, "say"), which, count, step)
    if kind == "follow":
        return ev.Follows(host, _text(message, "task"))
    if kind == "evaluated":
        return _evaluated(message, host)
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
    asking = message.get("asking", [])
    if not isinstance(asking, list) or len(asking) > MANY or not all(isinstance(name, str) for name in asking):
        raise WireError("beat: asking is no list")
    return ev.Beat(host, {name: _progress(data) for name, data in tasks.items()}, float(memory), tuple(asking))


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


def _saved(message: Mapping[str, Any], host: str) -> ev.Saved:
    numbers, parts = _metrics(message), _number(message, "parts")
    if not 1 <= parts <= MANY:
        raise WireError("parts is no number of tasks")
    return ev.Saved(host, _text(message, "task"), _id(message), parts, numbers, _texts(message, "versions"))


def _evaluated(message: Mapping[str, Any], host: str) -> ev.Evaluated:
    error = _text({"error": "", **message}, "error")
    return ev.Evaluated(host, _text(message, "task"), _id(message), _metrics(message), error)


def _metrics(message: Mapping[str, Any]) -> dict[str, float]:
    metrics = message.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > MANY:
        raise WireError("metrics is no object")
    return {str(name): float(value) for name, value in metrics.items() if _is_finite(value)}


def _stored(message: Mapping[str, Any], host: str) -> ev.Stored:
    task, id, error = _text(message, "task"), _id(message), _error(message)
    if error is not None:
        return ev.Stored(host, task, id, error=error)
    return ev.Stored(host, task, id, _files(message), at=_number(message, "at"), more=bool(message.get("more")))


def _id(message: Mapping[str, Any]) -> Id:
    given = message.get("snapshot")
    if not isinstance(given, list) or len(given) != 2 or not all(type(n) is int and 0 <= n < 2**53 for n in given):
        raise WireError("snapshot is no step and generation")
    return Id(*given)


def _error(message: Mapping[str, Any]) -> dict[str, Any] | None:
    error = message.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        raise WireError("error is no object")
    return {"kind": _text(error, "kind"), "text": _text(error, "text"), "passing": bool(error.get("passing"))}


def _files(message: Mapping[str, Any]) -> tuple[File, ...]:
    files = message.get("files")
    try:
        assert isinstance(files, list)
        found = tuple(File(str(path), int(size), str(digest)) for path, size, digest in files)
    except (AssertionError, TypeError, ValueError):
        raise WireError("files is no list of paths, sizes and digests") from None
    for file in found:
        if not fit(file.path) or file.size < 0 or not is_digest(file.sha256):
            raise WireError(f"{file.path!r} is no file of a snapshot")
    return found


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
