"""Files on this machine: read, written and hashed in one pass, and synced to disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator

from paceline.storage.regular_files import open_regular
from paceline.storage.stores.protocol import PIECE, ContinueCheck, TransferCanceled

MODE = 0o600
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
SYNCED_WHOLE = ("ext4", "xfs")  # file systems on which syncfs() is reliable; on others, data has stayed unwritten
_BUFFER = 256 * 1024  # bytes: small enough to stay in the processor's cache until written and hashed


def digest(source: str, should_continue: ContinueCheck) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    reading = open_regular(source, follow=True)
    try:
        return _read_all(reading, source, should_continue)
    finally:
        os.close(reading)


def copy(source: str, target: str, should_continue: ContinueCheck, sync: bool) -> tuple[int, str]:
    """Copy to a new file; return its size and SHA-256."""
    reading = open_regular(source, follow=True)
    try:
        writing = os.open(target, NEW, MODE)
        try:
            size_and_digest = _read_all(reading, source, should_continue, writing)
            if sync:
                os.fsync(writing)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return size_and_digest


def _read_all(reading: int, source: str, should_continue: ContinueCheck, writing: int | None = None) -> tuple[int, str]:
    sha256, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(max(1, min(_BUFFER, os.fstat(reading).st_size))))
    while True:
        length = os.readv(reading, [buffer])
        if not should_continue(length):
            raise TransferCanceled(source)
        if not length:
            return size, sha256.hexdigest()
        data = buffer[:length]
        if writing is not None:
            write_all(writing, data)
        sha256.update(data)
        size += length


def pieces(fd: int, start: int = 0, size: int | None = None) -> Iterator[bytes]:
    """Read the file in pieces. `size`: at most so many bytes."""
    while data := os.pread(fd, PIECE if size is None else min(size, PIECE), start):
        yield data
        start += len(data)
        size = None if size is None else size - len(data)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove_tree(folder: str, ignore_errors: bool = False) -> None:
    """Delete a folder and everything in it, at any depth: shutil.rmtree() needs a level of recursion and a descriptor
    for each level of folders, and a program may nest thousands."""
    try:
        shutil.rmtree(folder, ignore_errors)
        if not _is_folder(folder):
            return
    except RecursionError:
        pass
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENAMETOOLONG):
            raise
    _flatten(folder)
    shutil.rmtree(folder, ignore_errors)


def _flatten(folder: str) -> None:
    """Move all folders below this one to its top level."""
    unique, numbers = os.urandom(4).hex(), itertools.count()
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    while names:
        parent = f"{folder}/{names.pop()}"
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    name = f".{unique}.{next(numbers)}"
                    os.rename(f"{parent}/{entry.name}", f"{folder}/{name}")
                    names.append(name)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def sync(path: str) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not support it, and does not need it
            raise
    finally:
        os.close(fd)


def sync_all_of(folder: str) -> bool:
    """Sync the whole file system of the folder. False: not done, as syncfs() might lose data or hide errors here."""
    if _file_system(folder) not in SYNCED_WHOLE or _kernel_version() < (5, 8):
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


def _file_system(folder: str) -> str:
    device = os.stat(folder).st_dev
    with open("/proc/self/mountinfo") as mounts:
        for mount in mounts:
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return mount.partition(" - ")[2].split()[0]
    return ""


def _kernel_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]+", os.uname().release)[:2]))
