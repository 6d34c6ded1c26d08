"""A snapshot as a folder of this machine, for a program that is run with it: fetched once, verified, kept for later."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.storage.manifest import Manifest
from paceline.storage.store import Wanted
from paceline.view import runs, snapshots
from paceline.view.places import Source

MOST = 5  # that are kept here, of all runs together
_LOCK = ".lock"


@dataclass(frozen=True)
class Held:
    """As long as the descriptor is open, in this process or in one that it becomes, nobody removes the folder."""

    folder: Path  # has the snapshot's name
    lock: int

    def close(self) -> None:
        os.close(self.lock)


def hold(source: Source, made: Manifest, still: Wanted) -> Held:
    folder = _of_run(source.run, source.where) / str(made.id)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder.with_name(folder.name + _LOCK)
    while True:
        lock = _locked(path, fcntl.LOCK_SH)
        if folder.is_dir():
            os.utime(lock)
            _leave(MOST)
            return Held(folder, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for whoever fetches it already
            if not folder.is_dir():
                for left in folder.parent.glob(f".{folder.name}.*"):  # by one that was killed
                    shutil.rmtree(left, ignore_errors=True)
                snapshots.copy(source.transfers, made, folder, still)
        finally:
            os.close(lock)


def forget(run: str) -> None:
    """What nobody uses of a run that was deleted."""
    for folder in _all().glob(f"{run}@*"):
        for path in folder.glob(f"*{_LOCK}"):
            _remove(path)


def _all() -> Path:
    return runs.home() / "restored"


def _of_run(run: str, where: str) -> Path:
    """Runs of the same id at two places are two."""
    return _all() / f"{run}@{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def _leave(most: int) -> None:
    """Those that were used last, and those that are in use."""
    found = []
    for path in _all().glob(f"*/*{_LOCK}"):
        try:
            found.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            continue  # another process does the same
    for _, path in sorted(found, reverse=True)[most:]:
        _remove(path)


def _remove(path: Path) -> None:
    try:
        lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    try:
        shutil.rmtree(path.with_name(path.name.removesuffix(_LOCK)), ignore_errors=True)
        path.unlink()
        path.parent.rmdir()
    except OSError:
        pass  # others of the run are there
    finally:
        os.close(lock)


def _locked(path: Path, how: int) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:
            pass  # it was removed meanwhile
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
