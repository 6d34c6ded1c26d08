"""Switches to another user for a while, because root may read and write everything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SOMEBODY = 12345


@contextlib.contextmanager
def somebody() -> Iterator[int]:
    """Switches to an unprivileged user id if these tests run as root; otherwise keeps the current user."""
    groups, root = os.getgroups(), os.geteuid() == 0
    if root:
        os.setgroups([])
        os.setegid(SOMEBODY)
        os.seteuid(SOMEBODY)
    try:
        yield os.geteuid()
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)
