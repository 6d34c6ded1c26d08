"""Files that frameworks have compiled: kept within limits, safe after a crash, and stored as one signed object.

Frameworks replace missing files, but not all of them tolerate damaged ones. Most files are complete when their name
appears; after a crash of the machine, only those that were synced before.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.storage import boots
from paceline.storage.local_files import digest, sync, sync_all_of, write_all
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.manifest import is_safe_path
from paceline.storage.stores.protocol import ContinueCheck, Store

FOLDER = "compiled"  # in the store of a run: one object for each host
MOST_FILES = 20_000
MOST_BYTES = 4 << 30
MOST_STORED = 256 << 20  # bytes of an object in the store
SETTLED_S = 5.0  # younger files are not stored: a compiler may still be writing them
LEAST_AGE_S = 600.0  # younger files are not deleted: a task may be compiling
_ENTRIES = 200_000  # files and folders that are looked at
_OWN = (".boot-", ".synced")  # names of our own files
_CLOCK_S = 1.0  # by which the times of files may be imprecise
_HEAD = 16 << 20


@dataclass(frozen=True)
class CompiledFile:
    path: str
    size: int
    changed: float
    used: float


def files_in(folder: str) -> list[CompiledFile]:
    """Regular files, except those whose names begin with a dot: they are incomplete, or our own."""
    return [file for file in _scan(folder) if not os.path.basename(file.path).startswith(".")]


def _scan(folder: str) -> Iterator[CompiledFile]:
    folders, seen = [folder], 0
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _ENTRIES:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif not entry.name.startswith(_OWN):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            used = max(status.st_atime, status.st_mtime)
                            yield CompiledFile(entry.path, status.st_size, status.st_mtime, used)
        except OSError:
            continue  # a task has just removed it


# ---- limits


def trim(root: str, most_files: int = MOST_FILES, most_bytes: int = MOST_BYTES) -> int:
    """Delete the files that were used the longest ago until the rest is within the limits; return their number."""
    files = sorted(_scan(root), key=lambda file: file.used, reverse=True)
    young = time.time() - LEAST_AGE_S
    size = deleted = 0
    for number, file in enumerate(files):
        size += file.size
        is_left_over = os.path.basename(file.path).startswith(".")  # by a process that was killed
        if (is_left_over or number >= most_files or size > most_bytes) and file.used < young:
            with contextlib.suppress(OSError):
                os.unlink(file.path)
                deleted += 1
    return deleted


# ---- crashes of the machine


def drop_unsynced(folder: str) -> int:
    """If this machine was restarted since the last call: delete files that had not been synced; return their number."""
    path = f"{folder}/.boot-{os.uname().nodename}"  # several machines may share the folder
    mark = boots.read_mark(path)
    if mark == boots.boot_id():
        return 0
    was_restarted = mark is not None
    deleted = 0
    for compiled in files_in(folder) if was_restarted else ():
        if compiled.changed > _synced_until(folder):
            with contextlib.suppress(OSError):
                os.unlink(compiled.path)
                deleted += 1
    with contextlib.suppress(OSError):
        boots.write_mark(path)
    return deleted


def _synced_until(folder: str) -> float:
    try:
        return os.stat(f"{folder}/.synced").st_mtime
    except OSError:
        return 0.0


def sync_new(folder: str) -> None:
    synced, began = _synced_until(folder), time.time() - _CLOCK_S
    new = [file.path for file in files_in(folder) if file.changed > synced]
    if not new:
        return
    if not sync_all_of(folder):
        for path in new:
            with contextlib.suppress(FileNotFoundError):
                sync(path)
        for parent in {os.path.dirname(path) for path in new}:
            sync(parent)
    with open(f"{folder}/.synced", "w") as file:
        os.utime(file.fileno(), (began, began))


# ---- the copy in the store


class StoredCompiled:
    """One object for each host: a line with a signature, a line of JSON that lists the files, and their contents.

    The signature proves that a host of this run wrote it. Whoever can only write to the store cannot make a host load
    code from there.
    """

    def __init__(self, store: Store, run: str, key: bytes) -> None:
        self._store, self._run = store, run
        self._key = hmac.new(key, b"paceline compiled files", hashlib.sha256).digest()
        self._sent: dict[str, int] = {}  # path -> size

    def send(self, host: str, folder: str, scratch: str, should_continue: ContinueCheck) -> bool:
        """Send all files if there are new ones, the newest first while they fit; return whether it did."""
        chosen: dict[str, int] = {}
        room, settled = MOST_STORED, time.time() - SETTLED_S
        for file in sorted(files_in(folder), key=lambda file: file.used, reverse=True):
            path = os.path.relpath(file.path, folder)
            if file.changed < settled and file.size <= room and len(chosen) < MOST_FILES and is_safe_path(path):
                chosen[path] = file.size
                room -= file.size
        if not chosen or chosen.items() <= self._sent.items():
            return False
        described = {path: digest(f"{folder}/{path}", should_continue) for path in chosen}
        head = json.dumps({**_origin(host, folder), "files": described}).encode()
        target = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(target, self._signature(head) + b"\n" + head + b"\n")
            for path, (size, _) in described.items():
                write_all(target, _read(f"{folder}/{path}", size))
        finally:
            os.close(target)
        self._store.send_all([(scratch, self._name(host))], should_continue, {})
        os.unlink(scratch)
        self._sent = chosen
        return True

    def fetch(self, host: str, folder: str, scratch: str, should_continue: ContinueCheck) -> int:
        """Add the files that the folder lacks; return their number. What is not signed or damaged is ignored."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        try:
            self._store.fetch(self._name(host), scratch, _up_to(MOST_STORED + _HEAD, should_continue))
        except KeyError:
            return 0
        added = 0
        try:
            with open(scratch, "rb") as file:
                signature, head = file.readline(100).rstrip(b"\n"), file.readline(_HEAD).rstrip(b"\n")
                if not hmac.compare_digest(signature, self._signature(head)):
                    return 0
                description = json.loads(head)
                if {**description, "files": None} != {**_origin(host, folder), "files": None}:
                    return 0  # another kind of machine cannot run it
                for path, (size, sha256) in description["files"].items():
                    data = file.read(size)
                    if hashlib.sha256(data).hexdigest() == sha256 and is_safe_path(path):
                        added += _add(f"{folder}/{path}", data)
        finally:
            os.unlink(scratch)
        return added

    def _signature(self, head: bytes) -> bytes:
        return hmac.new(self._key, head, hashlib.sha256).hexdigest().encode()

    def _name(self, host: str) -> str:
        return f"{self._run}/{FOLDER}/{host}"


def _up_to(limit: int, should_continue: ContinueCheck) -> ContinueCheck:
    """Cancels a transfer of more bytes: others may have replaced the object."""
    received = 0

    def check(size: int) -> bool:
        nonlocal received
        received += size
        return received <= limit and should_continue(size)

    return check


def _origin(host: str, folder: str) -> dict[str, str]:
    return {"host": host, "machine": os.path.basename(folder)}


def _read(path: str, size: int) -> bytes:
    with open(open_regular(path), "rb") as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise OSError(0, "the file has changed", path)
    return data


def _add(path: str, data: bytes) -> bool:
    if os.path.lexists(path):
        return False
    folder, name = os.path.split(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    partial = f"{folder}/.{name[:100]}.{os.urandom(4).hex()}.partial"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700), "wb") as file:
        file.write(data)
    os.replace(partial, path)
    return True
