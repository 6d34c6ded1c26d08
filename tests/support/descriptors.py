"""A process without a free file descriptor."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what earlier tests left would free descriptors in the meantime
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    used = []
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.dup(0))
        yield
    finally:
        for fd in used:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
