"""Where the lab keeps things: one cache folder for what is built once, and one folder for each cluster that is up."""

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
    """What one cluster keeps; the folder goes with it, its logs stay for a while."""

    name: str

    @property
    def folder(self) -> Path:
        return cache() / "clusters" / self.name

    @property
    def logs(self) -> Path:
        return cache() / "logs" / self.name

    @property
    def alive(self) -> Path:
        """Locked for as long as the cluster lives."""
        return self.folder.with_name(f"{self.name}.lock")

    @property
    def starting(self) -> Path:
        """The lock of everybody who starts a cluster or clears one away."""
        return self.folder.with_name("starting")

    @property
    def socket(self) -> Path:
        return self.folder / "control"

    @property
    def pid(self) -> Path:
        """Of the first process inside, whose namespaces a person may enter."""
        return self.folder / "pid"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def etcd(self) -> Path:
        return self.folder / "etcd"

    @property
    def shared(self) -> Path:
        """The same folder on every node."""
        return self.folder / "shared"

    def disk(self, node: str) -> Path:
        return self.folder / "disks" / node


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def key(*parts: bytes | str) -> str:
    """A short name for exactly these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold this lock file; `waiting` is said once if it is not free."""
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
    """The folder, made if it is not there: beside its place and renamed when complete, by one process at a time."""
    if folder.is_dir():
        return folder
    name = folder.name
    with locked(folder.parent / f".{name}.lock", f"another process is making {name}: waiting for it"):
        if folder.is_dir():
            return folder
        partial = folder.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder
