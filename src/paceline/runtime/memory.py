"""Memory for the copy of a state: one block, taken once and used for every snapshot."""

from __future__ import annotations

import mmap


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
