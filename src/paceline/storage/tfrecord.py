"""TensorBoard event files, written and read with the standard library only.

A file is a sequence of records: length (8 bytes), its checksum (4), the record, its checksum (4). A record is a
protocol buffer `Event`: field 1 is the time, 2 the step, 3 the file version, 5 the summary with its values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import BinaryIO

VERSION = b"brain.Event:2"
_HEAD = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_MOST = 1 << 30  # maximum bytes of a record; a larger length is invalid data


class Torn(ValueError):
    """The next record is incomplete: its writer was killed, or is still writing."""


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def checksum(data: bytes) -> int:
    """CRC-32C, masked as TensorFlow does.

    >>> hex(checksum(b"123456789"))
    '0xc78ab0e5'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def framed(record: bytes) -> bytes:
    head = struct.pack("<Q", len(record))
    return head + _CHECK.pack(checksum(head)) + record + _CHECK.pack(checksum(record))


def first(wall: float) -> bytes:
    """The first record of a file."""
    return framed(_time(wall) + _field(3, VERSION))


def scalars(step: int, wall: float, values: Mapping[str, float]) -> bytes:
    """A record with the values of a step."""
    summary = b"".join(_field(1, _value(tag, value)) for tag, value in values.items())
    return framed(_time(wall) + b"\x10" + _varint(step) + _field(5, summary))


def records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each complete record with its offset in the file. Raises Torn at an incomplete or invalid record.

    Checksums of records are not verified: TensorBoard does that.
    """
    while True:
        begin = file.tell()
        head = file.read(_HEAD.size)
        if not head:
            return
        if len(head) < _HEAD.size:
            raise Torn(f"incomplete record at byte {begin}")
        length, check = _HEAD.unpack(head)
        if check != checksum(head[:8]) or length > _MOST:
            raise Torn(f"incomplete record at byte {begin}")
        body = file.read(length + _CHECK.size)
        if len(body) < length + _CHECK.size:
            raise Torn(f"incomplete record at byte {begin}")
        yield begin, body[:length]


def step_of(record: bytes) -> int | None:
    """The step of an event with a summary; None for other events, such as the first of a file."""
    summary = summary_of(record)
    return None if summary is None else summary[0]


def summary_of(record: bytes) -> tuple[int, tuple[str, ...]] | None:
    """The step of an event and the tags of its summary; None for an event without a summary."""
    step, summary = 0, None
    try:
        for number, wire, value in _fields(record):
            if number == 2 and wire == 0:
                assert isinstance(value, int)
                step = value - (1 << 64) if value >> 63 else value
            elif number == 5 and wire == 2:
                summary = value
        if not isinstance(summary, bytes):
            return None
        values = [value for number, wire, value in _fields(summary) if number == 1 and isinstance(value, bytes)]
        names = [name for value in values for number, _, name in _fields(value) if number == 1]
        return step, tuple(name.decode("utf-8", "replace") for name in names if isinstance(name, bytes))
    except (IndexError, ValueError):
        return None


# ---- protocol buffers


def _value(tag: str, value: float) -> bytes:
    # As tf.summary.scalar writes it: a tensor with one float, for the scalars plugin.
    tensor = b"\x08\x01" + _field(2, b"") + _field(5, struct.pack("<f", value))
    metadata = _field(1, _field(1, b"scalars")) + b"\x20\x01"
    return _field(1, tag.encode()) + _field(8, tensor) + _field(9, metadata)


def _time(wall: float) -> bytes:
    return b"\x09" + struct.pack("<d", wall)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field; IndexError or ValueError if it is not a message."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, wire, value
            continue
        if wire == 2:
            size, at = _read_varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(wire)
        yield key >> 3, wire, data[at : at + size]
        at += size
