"""Framing of messages between agents: length-prefixed JSON objects of limited size, the same in both directions."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from paceline.storage.json_values import parse_json

PROTOCOL = 1
LIMIT = 4 * 1024 * 1024
MEMBER_LIMIT = 8 * 1024 * 1024  # bytes of a message from a member, also if the captain passes it on
UNPACKED_LIMIT = 64 * 1024 * 1024
_HEADER = struct.Struct(">I")
_PACKED = 0x80000000

Message = dict[str, Any]


class WireError(Exception):
    """A peer sent something that is not a valid message; its connection is closed."""


def encode(message: Message) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(payload)) + payload


def encode_packed(message: Message) -> bytes:
    """For messages that many members receive: compressed once, the same bytes are sent to all."""
    payload = zlib.compress(json.dumps(message, separators=(",", ":")).encode(), 1)
    return _HEADER.pack(len(payload) | _PACKED) + payload


class Decoder:
    """Turns bytes into complete messages."""

    def __init__(self, limit: int = LIMIT, accepts_packed: bool = True) -> None:
        """`accepts_packed`: only the captain sends packed messages. A packed message of some kilobytes can take seconds
        to read."""
        self._buffer = bytearray()
        self._limit, self._accepts_packed = limit, accepts_packed

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (header,) = _HEADER.unpack_from(self._buffer)
            length = header & ~_PACKED
            if length > self._limit:
                raise WireError(f"a message of {length} bytes is over the limit of {self._limit}")
            if header & _PACKED and not self._accepts_packed:
                raise WireError("a packed message is not accepted here")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            messages.append(_decode(payload, bool(header & _PACKED)))
        return messages


def _decode(payload: bytes, packed: bool) -> Message:
    try:
        if packed:
            unpacker = zlib.decompressobj()
            payload = unpacker.decompress(payload, UNPACKED_LIMIT)
            if unpacker.unconsumed_tail or not unpacker.eof:
                raise WireError(f"a message decompresses to more than {UNPACKED_LIMIT} bytes, or is truncated")
        message = parse_json(payload)
    except (ValueError, zlib.error) as error:
        raise WireError(f"not a message: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("not a message: no type")
    return message
