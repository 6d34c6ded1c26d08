"""Folders of the lab: one cache folder for built components, and one folder for each running cluster."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LAB = Path(__file__).parent
TESTS = LAB.parents[1]
PROJECT = LAB.parents[2]


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "paceline-cluster"


@dataclass(frozen=True)
class Place:
    """The files of one cluster; the folder is removed when it ends, the logs are kept for a while."""

    name: str

    @property
    def folder(self) -> Path:
        return cache() / "clusters" / self.name

    @property
    def logs(self) -> Path:
        return cache() / "logs" / self.name

    @property
    def alive(self) -> Path:
        """A file that is locked while the cluster runs."""
        return self.folder.with_name(f"{self.name}.lock")

    @property
    def starting(self) -> Path:
        """The lock file for starting clusters and for cleaning up after them."""
        return self.folder.with_name("starting")

    @property
    def socket(self) -> Path:
        return self.folder / "control"

    @property
    def pid(self) -> Path:
        """A file with the pid of the first process inside, whose namespaces a user may enter."""
        return self.folder / "pid"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def etcd(self) -> Path:
        return self.folder / "etcd"

    @property
    def shared(self) -> Path:
        """A folder that is shared by all nodes."""
        return self.folder / "shared"

    def disk(self, node: str) -> Path:
        return self.folder / "disks" / node


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def key(*parts: bytes | str) -> str:
    """A short hash of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Holds the lock on this file; prints the message `waiting` if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Creates the folder if it is missing: under a temporary name, renamed when complete, by one process at a time."""
    if folder.is_dir():
        return folder
    name = folder.name
    with locked(folder.parent / f".{name}.lock", f"another process is building {name}: waiting for it"):
        if folder.is_dir():
            return folder
        partial = folder.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder
