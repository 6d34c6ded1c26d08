"""Dataclasses as JSON objects: each field is validated by the reader of its annotated type.

Readers are looked up by the text of an annotation. This works in every Python since 3.9, and allows aliases that
imply a limit (`Seconds`, `PartCount`). A type without a reader is an error when the codec is created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Callable

from paceline.agent.net.frames import Message, WireError
from paceline.agent.options import SHARED_FOLDER
from paceline.storage.snapshots.manifest import File, SnapshotId, is_digest, is_safe_path, is_size, pair

TEXT_LIMIT = 64 * 1024
MANY = 100_000  # items of a list or an object
_LARGEST = 2**53
_LONGEST_HOST = 255  # characters

Seconds = float
Share = float  # fraction of memory in use
Amount = float  # bytes, cores
PartCount = int
HostPort = str
DataLocation = str
ServedAt = str  # SHARED_FOLDER, host:port, or empty
NotFiniteValue = str  # "NaN", "Infinity" or "-Infinity"

Reader = Callable[[Any], Any]


class Codec:
    """Encodes and decodes messages. `kinds`: their types by name; messages contain the name under the key `tag`."""

    def __init__(
        self,
        kinds: Mapping[str, type],
        tag: str = "type",
        readers: Mapping[str, Reader] | None = None,
        implied: tuple[str, ...] = (),
    ) -> None:
        """`readers`: additional readers for these messages. `implied`: fields that are not sent, because the receiver
        knows their values."""
        self._tag, self._implied = tag, implied
        self._names = {kind: name for name, kind in kinds.items()}
        all_readers = {**_READERS, **(readers or {})}
        self._kinds = {name: (kind, fields_of(kind, all_readers, implied)) for name, kind in kinds.items()}
        self._implied_of = {kind: {each.name for each in fields(kind)} & set(implied) for kind in kinds.values()}

    def encode(self, message: Any) -> Message:
        plain = {name: _plain(value) for name, value in vars(message).items() if name not in self._implied}
        return {self._tag: self._names[type(message)], **plain}

    def decode(self, data: Mapping[str, Any], **implied: Any) -> Any | None:
        """None for an unknown kind: a newer peer may send more kinds of messages."""
        entry = self._kinds.get(data[self._tag])
        if entry is None:
            return None
        kind, readers = entry
        try:
            values = read_fields(data, readers)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"{data[self._tag]}: {error!r}") from None
        return kind(**values, **{name: implied[name] for name in self._implied_of[kind]})


Fields = list[tuple[str, Reader, bool]]  # name, reader, whether it is required


def fields_of(kind: type, readers: Mapping[str, Reader], implied: tuple[str, ...] = ()) -> Fields:
    return [
        (each.name, readers[str(each.type)], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.name not in implied
    ]


def read_fields(data: Any, readers: Fields) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise WireError("not an object")
    values = {}
    for name, reader, required in readers:
        if name not in data:
            if required:
                raise WireError(f"{name} is missing")
            continue
        try:
            values[name] = reader(data[name])
        except WireError as error:
            raise WireError(f"{name}: {error}") from None
    return values


def reader_of(kind: type, more: Mapping[str, Reader] | None = None) -> Reader:
    """The reader of a dataclass inside a message."""
    readers = fields_of(kind, {**_READERS, **(more or {})})
    return lambda data: kind(**read_fields(data, readers))


def positional_reader_of(kind: type) -> Reader:
    """The reader of a dataclass that is sent as a list of its fields, in order."""
    readers = [reader for _, reader, _ in fields_of(kind, _READERS)]

    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(readers):
            raise WireError(f"not a list of {len(readers)} values")
        return kind(*[reader(each) for reader, each in zip(readers, value)])

    return read


def sequence_of(read: Reader, most: int = MANY) -> Reader:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise WireError("not a list, or too long")
        return tuple(map(read, value))

    return read_all


def mapping_of(read: Reader) -> Reader:
    def read_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MANY:
            raise WireError("not an object, or too large")
        return {str(name): read(each) for name, each in value.items()}

    return read_all


def optional(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def dispensable(read: Reader) -> Reader:
    """None if the value is invalid: the rest of the message counts without it."""

    def read_or_ignore(value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except (WireError, TypeError, ValueError, OverflowError):
            return None

    return read_or_ignore


def _by_snapshot(read: Reader) -> Reader:
    """A mapping by snapshot is sent as a list of pairs: the keys of JSON objects are strings."""

    def read_all(value: Any) -> dict[SnapshotId, Any]:
        if value == {}:
            return {}  # the type of the keys of an empty mapping is unknown when it is encoded
        if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == 2 for each in value):
            raise WireError("not a list of pairs")
        return {_snapshot(snapshot): read(each) for snapshot, each in value}

    return read_all


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def not_finite_text(value: Any) -> str:
    """`NaN`, `Infinity` or `-Infinity`; empty: another value.

    >>> [not_finite_text(each) for each in (float("nan"), float("inf"), float("-inf"), 0.5, "NaN")]
    ['NaN', 'Infinity', '-Infinity', '', '']
    """
    if not isinstance(value, float) or math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_LIMIT:
        raise WireError("not a string, or too long")
    return value


def _long_text(value: Any) -> str:
    if not isinstance(value, str):
        raise WireError("not a string")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _LARGEST:
        raise WireError("not an integer")
    return value


read_integers = sequence_of(_integer)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WireError("not a boolean")
    return value


def _within(least: float, below: float) -> Reader:
    def read(value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < below:
            raise WireError(f"not a number from {least:g} to {below:g}")
        return float(value)

    return read


def _part_count(value: Any) -> int:
    if not 1 <= _integer(value) <= MANY:
        raise WireError("not a number of tasks")
    return int(value)


def _metrics(value: Any) -> dict[str, float]:
    """Drops values that are not finite: a loss can be NaN."""
    if not isinstance(value, dict) or len(value) > MANY:
        raise WireError("not an object, or too large")
    return {str(name): float(each) for name, each in value.items() if is_finite(each)}


def _not_finite_value(value: Any) -> str:
    if value not in ("NaN", "Infinity", "-Infinity"):
        raise WireError("not NaN or infinite")
    return str(value)


def data_location(text: str) -> str:
    """Empty, which means that it is unknown, if it cannot be a variable of a task: a file that was not on the disk yet
    when the machine lost power may consist of NULs. A path need not be UTF-8.

    >>> [data_location(each) for each in ("s3://bucket/3f9a", "\\0" * 16)]
    ['s3://bucket/3f9a', '']
    """
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeError:
        return ""
    return "" if len(text) > TEXT_LIMIT or "\0" in text else text


def _host_port(value: Any) -> str:
    """It becomes part of the environment of all tasks."""
    host, _, port = _text(value).rpartition(":")
    if not host or len(host) > _LONGEST_HOST or not host.isprintable() or not host.isascii():
        raise WireError("not host:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise WireError("not host:port")
    return str(value)


def _served_at(value: Any) -> str:
    return str(value) if value in ("", SHARED_FOLDER) else _host_port(value)


def _snapshot(value: Any) -> SnapshotId:
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if not is_pair or not all(type(each) is int and 0 <= each < _LARGEST for each in value):
        raise WireError("not a step and a generation")
    return SnapshotId(*value)


def read_file(value: Any) -> File:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise WireError("not a path, a size and a digest")
    path, size, digest = value
    if not isinstance(path, str) or not is_safe_path(path) or type(size) is not int or not is_size(size):
        raise WireError(f"{path!r} is not a valid file of a snapshot")
    if not isinstance(digest, str) or not is_digest(digest):
        raise WireError(f"{path!r} is not a valid file of a snapshot")
    return File(path, size, digest)


_READERS: dict[str, Reader] = {
    "str": _text,
    "str | None": optional(_text),
    "LongText": _long_text,
    "DataLocation": lambda value: data_location(_text(value)),
    "int": _integer,
    "int | None": optional(_integer),
    "bool": _boolean,
    "bool | None": optional(_boolean),
    "float": _within(-1e300, 1e300),
    "ServedAt": _served_at,
    "Seconds": _within(0, 1e9),
    "Seconds | None": optional(_within(0, 1e9)),
    "Share": _within(0, 1000),
    "Amount": _within(0, 1e18 + 1),
    "PartCount": _part_count,
    "NotFiniteValue": _not_finite_value,
    "Mapping[str, NotFiniteValue]": mapping_of(_not_finite_value),
    "SnapshotId": _snapshot,
    "SnapshotId | None": optional(_snapshot),
    "Metrics": _metrics,
    "tuple[str, ...]": sequence_of(_text),
    "tuple[int, ...]": read_integers,
    "tuple[SnapshotId, ...]": sequence_of(_snapshot),
    "tuple[File, ...]": sequence_of(read_file),
    "Mapping[str, str]": mapping_of(_text),
    "Mapping[str, HostPort]": mapping_of(_host_port),
    "Mapping[str, int]": mapping_of(_integer),
    "Mapping[str, SnapshotId | None]": mapping_of(optional(_snapshot)),
    "Mapping[SnapshotId, float]": _by_snapshot(_within(-1e300, 1e300)),
    "Mapping[SnapshotId, Metrics]": _by_snapshot(_metrics),
}


def _plain(value: Any) -> Any:
    if isinstance(value, SnapshotId):
        return pair(value)
    if isinstance(value, File):
        return [value.path, value.size, value.sha256]
    if is_dataclass(value):
        compact = getattr(value, "to_wire", None)
        return {name: _plain(each) for name, each in vars(value).items()} if compact is None else compact()
    if isinstance(value, Mapping):
        if any(isinstance(key, SnapshotId) for key in value):
            return [[pair(key), _plain(each)] for key, each in value.items()]
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
