"""The JSON files of a run, checked when they are read: readers get fields of the right types, or the reason why not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline import plan as plans
from paceline.errors import PacelineError
from paceline.storage.json_values import DEEPEST, is_deep
from paceline.storage.regular_files import open_regular

LARGEST_FILE = 128 * 1024 * 1024  # bytes: more than any file of a run has, and no problem for this machine
MAX_VALUES = 6_000_000  # a plan of 100,000 tasks has 2 million; many small ones use gigabytes
LARGEST_COUNT = 2**31 - 1  # also of seconds: small enough for every timer
_LARGEST = 2**63

Check = Callable[[Any], bool]


class DamagedRun(PacelineError):
    """A file of the run cannot be used; the message names the file and says what is wrong with it."""


class NewerRun(PacelineError):
    """A newer version of Paceline wrote the file, in a format that this version does not know."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "upgrade Paceline to read it") -> None:
        super().__init__(what, where=where, remedy=remedy)


@dataclass(frozen=True)
class Contents:
    """What a file contains. Fields of wrong types are left out."""

    fields: dict[str, Any] | None  # None: the file does not exist, or nothing in it can be used
    error: PacelineError | None = None

    @property
    def problem(self) -> str:
        return "" if self.error is None else str(self.error)


def load_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file does not exist. DamagedRun: it cannot be read."""
    try:
        with os.fdopen(open_regular(str(path), follow=True), "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedRun(f"cannot be read: {error.strerror}", where=path.name) from None
    if len(data) > LARGEST_FILE:
        raise DamagedRun(f"is damaged: it is larger than {LARGEST_FILE >> 20} MiB", where=path.name)
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise DamagedRun(str(error), where=path.name) from None
    if not isinstance(fields, dict):
        raise DamagedRun("is damaged: it is not a JSON object", where=path.name)
    return fields


def parse_json(data: bytes | str) -> Any:
    """ValueError: it is not JSON, or too large or nested too deeply for its readers."""
    raw = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    if len(raw) > MAX_VALUES and sum(map(raw.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise ValueError(f"is damaged: it has more than {MAX_VALUES} values")
    try:
        value = _loads(data)
        # Strings contain brackets, too: only a value with many of them is inspected.
        if sum(map(raw.count, (b"[", b"{"))) > DEEPEST and is_deep(value):
            raise RecursionError
        return value
    except RecursionError:
        raise ValueError(f"is damaged: it is nested deeper than {DEEPEST} levels") from None
    except ValueError:
        raise ValueError("is damaged: it is not complete JSON") from None


def _loads(data: bytes | str) -> Any:
    """With a parser that is four times as fast, if this process uses it anyway, as the page does: to import it takes
    longer than to read the files of most runs."""
    pydantic_core = sys.modules.get("pydantic_core")
    if pydantic_core is not None:
        with suppress(ValueError):  # it does not accept half a surrogate pair, which Python writes
            return pydantic_core.from_json(data)
    return json.loads(data)


def info(folder: Path) -> Contents:
    """The contents of run.json."""
    return _read(folder / "run.json", _RUN)


def report(folder: Path) -> Contents:
    """The contents of report.json. A report without a status is damaged."""
    contents = _read(folder / "report.json", REPORT)
    (contents.fields or {}).pop("problems", None)  # for what readers of the run find out
    if contents.fields is None or "status" in contents.fields:
        return contents
    error = contents.error or DamagedRun("is damaged: `status` is missing", where="report.json")
    return Contents(None, error)


def plan(folder: Path) -> Contents:
    """The parts of plan.json that readers of a run use."""
    contents = _read(folder / "plan.json", _PLAN)
    version = (contents.fields or {}).get("version", plans.VERSION)
    if version > plans.VERSION:
        return Contents(None, newer_plan(version))
    return contents


def planned(folder: Path) -> dict[str, Any]:
    """Like `plan`; DamagedRun or NewerRun if it cannot be used."""
    contents = plan(folder)
    if contents.error is not None:
        raise contents.error
    return contents.fields or {}


def newer_plan(version: object, where: str = "plan.json") -> NewerRun:
    return NewerRun(f"this run was started by a newer Paceline (plan version {version})", where=where)


def _read(path: Path, checks: Mapping[str, Check]) -> Contents:
    try:
        fields = load_object(path)
    except DamagedRun as damage:
        return Contents(None, damage)
    if fields is None:
        return Contents(None)
    wrong = [name for name, check in checks.items() if name in fields and not check(fields[name])]
    if not wrong:
        return Contents(fields)
    error = DamagedRun(f"is damaged: `{wrong[0]}` cannot be {as_shown(fields[wrong[0]])}", where=path.name)
    return Contents({name: value for name, value in fields.items() if name not in wrong}, error)


def as_shown(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# ---- checks of single fields


def is_number(value: Any) -> bool:
    """Finite, and small enough to calculate with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def is_measurement(value: Any) -> bool:
    """The value of a metric: a loss can be NaN or infinite."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_duration(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LARGEST_COUNT


def is_time(value: Any) -> bool:
    return isinstance(value, str) and parse_time(value) is not None


def parse_time(text: str) -> datetime | None:
    """An ISO time between the years 1970 and 9998, so that it can be shown in any time zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if 1970 <= time.year < 9999 else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_process(value: Any) -> bool:
    return is_count(value) and 0 < value < 2**31


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _map_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _object(required: Iterable[str] = (), **checks: Check) -> Check:
    def check(value: Any) -> bool:
        if not isinstance(value, dict) or any(name not in value for name in required):
            return False
        return all(each(value[name]) for name, each in checks.items() if name in value)

    return check


def _is_criterion(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], bool)


_text_or_none = _or_none(_is_text)
_RUN: dict[str, Check] = {
    **dict.fromkeys(("run", "job", "framework", "strategy", "captain", "machine", "version", "tensorboard"), _is_text),
    **dict.fromkeys(("on", "uid", "where", "metrics_url", "server"), _is_text),
    "kubeconfig": _list_of(_is_text),
    **dict.fromkeys(("context", "namespace"), _text_or_none),
    **dict.fromkeys(("detached", "submitted"), _is_boolean),
    "supervisor": _is_process,
    "started": is_time,
}
_RESTART = _object(
    cause=_text_or_none, task=_text_or_none, detail=_text_or_none, at=_text_or_none,
    first_step_after_s=_or_none(is_number),
)  # fmt: skip
_STARTED = _object(
    warm=_is_boolean, imports_s=is_number, joining_s=is_number, joined_s=is_number, restoring_s=is_number,
    restored_s=is_number, first_step_s=is_number,
)  # fmt: skip
_START = _object(("generation", "tasks"), generation=is_count, tasks=_map_of(_STARTED), advice=_text_or_none)
_BEST = _object(("snapshot", "metric", "value"), snapshot=_is_text, metric=_is_text, value=is_measurement)
_GOODPUT = _object(
    ("share", "wall_s", "seconds"), share=_is_duration, wall_s=_is_duration, seconds=_map_of(_is_duration),
    reports_steps=_is_boolean, since=_is_text,
)  # fmt: skip
_RESOURCES = _object(tasks=_is_object, hosts=_is_object)  # its readers check the numbers: there are thousands
REPORT: dict[str, Check] = {
    **dict.fromkeys(("run", "status", "folder"), _is_text),
    **dict.fromkeys(("reason", "cause"), _text_or_none),
    **dict.fromkeys(("started", "ended"), _or_none(is_time)),
    **dict.fromkeys(("generations", "steps", "skipped"), _or_none(is_count)),
    "steps_per_s": _or_none(is_number),
    "restarts": _or_none(_list_of(_RESTART)),
    "starts": _or_none(_list_of(_START)),
    "metrics": _or_none(_map_of(_map_of(is_measurement))),
    "best": _or_none(_BEST),
    "stacks": _or_none(_map_of(_is_text)),
    "goodput": _or_none(_GOODPUT),
    "resources": _or_none(_RESOURCES),
}
_PLAN: dict[str, Check] = {
    "version": is_count,
    "tasks": _list_of(_object(("name",), name=_is_text, host=_is_text)),
    "roles": _list_of(_object(env=_map_of(_is_text), decides=_is_boolean)),
    "limits": _object(grace=_is_duration),
    "snapshots": _object(to=_is_text, origin=_is_text, best=_or_none(_is_criterion)),
    "tensorboard": lambda value: isinstance(value, dict),
    "metrics": _is_boolean,
    "kubernetes": _object(context=_text_or_none, namespace=_text_or_none),
}
