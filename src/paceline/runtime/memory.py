"""Memory for the copy of a state: one block, taken once and used for every snapshot; and copying to it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

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


def copy(spans: Iterable[tuple[int, int, int]], threads: int) -> None:
    """Spans of memory: (to, from, bytes), as addresses.

    Threads take piece after piece. Torch's own threads halve each tensor and wait for the slower one, which was five
    times as long where others used the cores.
    """
    pieces = [
        (into + at, out + at, min(_PIECE, size - at)) for into, out, size in spans for at in range(0, size, _PIECE)
    ]
    left = iter(pieces)

    def work() -> None:
        for into, out, size in left:
            ctypes.memmove(into, out, size)  # without the lock of Python

    helpers = min(threads, _MOST, sum(size for _, _, size in pieces) // _SHARE) - 1
    if helpers < 1:
        work()
        return
    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(work) for _ in range(helpers)]
        work()
    for other in others:
        other.result()
