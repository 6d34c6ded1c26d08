"""Limits the memory that requests and responses use together."""

from __future__ import annotations

_FREE = 64 * 1024  # bytes of each request that are not counted, so that small requests are never refused


class OutOfMemory(Exception):
    """Requests and responses use as much memory as they may."""


class Memory:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def reserve(self) -> Reservation:
        return Reservation(self)

    def take(self, size: int, is_limited: bool) -> None:
        if is_limited and self.used + size > self._limit:
            raise OutOfMemory(f"requests and responses use {self.used} bytes; the limit is {self._limit}")
        self.used += size


class Reservation:
    """The bytes of one request and of its response."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._size, self._counted = memory, 0, 0

    def add(self, size: int, is_limited: bool = True) -> None:
        """Raises OutOfMemory. Not `is_limited`: bytes that exist already; later requests are refused instead."""
        self._size += size
        more = max(0, self._size - _FREE) - self._counted
        if more > 0:
            self._memory.take(more, is_limited)
            self._counted += more

    def release(self) -> None:
        self._memory.used -= self._counted
        self._counted = 0
