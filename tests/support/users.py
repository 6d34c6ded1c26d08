"""Being another user for a while: root may read and write everything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SOMEBODY = 12345


@contextlib.contextmanager
def somebody() -> Iterator[int]:
    """A user with nothing but a number, where these tests may choose who they are; else whoever runs them."""
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
