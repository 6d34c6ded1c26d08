"""One block of memory for copies of a state, allocated once and used for every snapshot, and a parallel copy to it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

_PIECE = 1 << 20
_BYTES_PER_THREAD = 8 << 20  # less is not worth the start of another thread
_MAX_THREADS = 8  # a few threads use the whole memory bandwidth


def block(size: int) -> mmap.mmap:
    """Anonymous memory of that many bytes, freed when nothing refers to it.

    Not from torch's allocator, which rounds pinned memory up to a power of two. Not inherited by forks: with a data
    loader's workers, every later copy into it would cause one page fault per page.
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
    """Copies spans of memory: (target address, source address, bytes).

    Threads share a queue of pieces. Torch's own threads split each tensor evenly and wait for the slowest one, which
    took five times as long on busy cores.
    """
    pieces = [
        (target + at, source + at, min(_PIECE, size - at))
        for target, source, size in spans
        for at in range(0, size, _PIECE)
    ]
    queue = iter(pieces)

    def work() -> None:
        for target, source, size in queue:
            ctypes.memmove(target, source, size)  # releases the GIL

    helpers = min(threads, _MAX_THREADS, sum(size for _, _, size in pieces) // _BYTES_PER_THREAD) - 1
    if helpers < 1:
        work()
        return
    with ThreadPoolExecutor(helpers) as pool:
        futures = [pool.submit(work) for _ in range(helpers)]
        work()
    for future in futures:
        future.result()
