"""Marks with the id of the current boot: files next to a mark of another boot may not have reached the disk."""

from __future__ import annotations

import contextlib
import os

from paceline.storage.regular_files import open_regular

_LONGEST = 1000


def boot_id() -> str:
    """The kernel's id of the current boot; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_mark(path: str) -> str | None:
    """The id in a mark; None: there is none."""
    try:
        with open(open_regular(path), errors="replace") as file:
            return file.read(_LONGEST)
    except OSError:
        return None


def write_mark(path: str) -> None:
    """Replaces the mark at once: another process that reads it would take half of it for another boot."""
    partial = f"{path}.{os.urandom(4).hex()}.partial"
    try:
        with open(partial, "w") as file:
            file.write(boot_id())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
