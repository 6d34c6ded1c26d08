"""Memory for the copy of a state: one block, taken once and used for every snapshot; and copying to it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable
from typing import Callable, Generic, TypeVar

T = TypeVar("T")

_PIECE = 1 << 20
_SHARE = 8 << 20  # bytes that one thread more is worth its start for
_MOST = 8  # threads: a few have all of the memory's bandwidth


def block(size: int) -> mmap.mmap:
    """Anonymous memory of that many bytes, given back when nothing refers to it any more.

    Not the allocator's: torch rounds pinned memory up to a power of two. Not inherited by forks: a data loader's
    workers would make every later copy into it a fault a page.
    """
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux has both
        if hasattr(mmap, name):
            try:
                memory.madvise(getattr(mmap, name))
            except OSError:
                pass  # a kernel without huge pages
    return memory


class Copying(Generic[T]):
    """Pieces on their way, moved by all threads that come to help."""

    def __init__(self, pieces: Iterable[T]) -> None:
        self._left = iter(list(pieces))
        self._helping = 0
        self._changed = threading.Condition()

    def finish(self, move: Callable[[T], object]) -> None:
        """Help until nothing is left, and wait for who else helps: all is there."""
        with self._changed:
            self._helping += 1
        try:
            for piece in self._left:
                move(piece)
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._helping)


def copy(spans: Iterable[tuple[int, int, int]], threads: int) -> None:
    """Spans of memory: (to, from, bytes), as addresses.

    Threads take piece after piece. Torch's own threads halve each tensor and wait for the slower one, which was five
    times as long where others used the cores.
    """
    pieces = [
        (into + at, out + at, min(_PIECE, size - at)) for into, out, size in spans for at in range(0, size, _PIECE)
    ]
    copying = Copying(pieces)

    def help() -> None:
        copying.finish(lambda piece: ctypes.memmove(*piece))  # without the lock of Python

    count = min(threads, _MOST, sum(size for _, _, size in pieces) // _SHARE) - 1
    helpers = [threading.Thread(target=help, name="paceline-copy") for _ in range(count)]
    for helper in helpers:
        helper.start()
    help()
    for helper in helpers:
        helper.join()
