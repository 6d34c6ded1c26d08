"""Files of this machine: read, written and digested in one pass, and brought to the disk."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
from collections.abc import Iterator

from paceline.storage.store import PIECE, Unwanted, Wanted

MADE = 0o600
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
SYNCED_WHOLE = (
    "ext4",
    "xfs",
)  # kinds of file systems, of one machine; others have been seen to keep data to themselves
_BUFFER = 256 * 1024  # bytes: what was read is still in the processor's cache when it is written and digested


def digest(source: str, wanted: Wanted) -> tuple[int, str]:
    """Its size and SHA-256."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_all(reading, source, wanted)
    finally:
        os.close(reading)


def copy(source: str, target: str, wanted: Wanted, sync: bool) -> tuple[int, str]:
    """Into a new file; digested on the way: one pass."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writing = os.open(target, NEW, MADE)
        try:
            found = _read_all(reading, source, wanted, writing)
            if sync:
                os.fsync(writing)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return found


def _read_all(reading: int, source: str, wanted: Wanted, writing: int | None = None) -> tuple[int, str]:
    made, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(max(1, min(_BUFFER, os.fstat(reading).st_size))))
    while True:
        length = os.readv(reading, [buffer])
        if not wanted(length):
            raise Unwanted(source)
        if not length:
            return size, made.hexdigest()
        data = buffer[:length]
        if writing is not None:
            write_all(writing, data)
        made.update(data)
        size += length


def pieces(fd: int) -> Iterator[bytes]:
    """What is left to read; then it is closed."""
    try:
        while data := os.read(fd, PIECE):
            yield data
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync(path: str) -> None:
    """What the file holds, or the names that the folder has, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, and need not
            raise
    finally:
        os.close(fd)


def sync_all_of(folder: str) -> bool:
    """Everything on its file system is on the disk. False: nothing was done, as it might not be, or nobody be told."""
    if _kind(folder) not in SYNCED_WHOLE or _kernel() < (5, 8):
        return False
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syncfs(fd)
    finally:
        os.close(fd)
    return True


def syncfs(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(fd):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _kind(folder: str) -> str:
    device = os.stat(folder).st_dev
    with open("/proc/self/mountinfo") as mounts:
        for mount in mounts:
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return mount.partition(" - ")[2].split()[0]
    return ""


def _kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]+", os.uname().release)[:2]))
