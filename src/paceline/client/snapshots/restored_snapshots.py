"""Restores snapshots to local folders for programs: fetched once, verified, cached for later."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.storage.snapshots.manifest import Manifest
from paceline.storage.stores.protocol import ContinueCheck
from paceline.view.files import run_folders
from paceline.view.snapshots import snapshot_listing
from paceline.view.snapshots.snapshot_locations import Source

MAX_CACHED = 5  # snapshots, of all runs together
_CACHE = "restored"  # a folder beside that of the runs
_LOCK = ".lock"


@dataclass(frozen=True)
class RestoredSnapshot:
    """The folder is not removed while the lock is open, in this process or in the program that replaces it."""

    folder: Path  # named like the snapshot
    lock: int  # file descriptor

    def close(self) -> None:
        os.close(self.lock)


def restore(source: Source, manifest: Manifest, progress: ContinueCheck) -> RestoredSnapshot:
    folder = _run_folder(source.run, source.address) / str(manifest.id)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder.with_name(folder.name + _LOCK)
    while True:
        lock = _locked(path, fcntl.LOCK_SH)
        if folder.is_dir():
            os.utime(lock)
            _evict(MAX_CACHED)
            return RestoredSnapshot(folder, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that is already fetching it
            if not folder.is_dir():
                for partial in folder.parent.glob(f".{folder.name}.*"):  # left by a process that was killed
                    shutil.rmtree(partial, ignore_errors=True)
                snapshot_listing.copy(source.transfers, manifest, folder, progress)
        finally:
            os.close(lock)


def remove(run: str, home: Path) -> None:
    """Removes the snapshots of a deleted run that are not in use. `home`: the folder with the folder of runs."""
    for folder in (home / _CACHE).glob(f"{run}@*"):
        for path in folder.glob(f"*{_LOCK}"):
            _remove_unused(path)


def _cache_folder() -> Path:
    return run_folders.home() / _CACHE


def _run_folder(run: str, address: str) -> Path:
    """Runs with the same id at different addresses are different runs."""
    return _cache_folder() / f"{run}@{hashlib.sha256(address.encode()).hexdigest()[:8]}"


def _evict(limit: int) -> None:
    """Removes all but the most recently used snapshots and those in use."""
    by_last_use = []
    for path in _cache_folder().glob(f"*/*{_LOCK}"):
        try:
            by_last_use.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            continue  # removed by another process in the meantime
    for _, path in sorted(by_last_use, reverse=True)[limit:]:
        _remove_unused(path)


def _remove_unused(path: Path) -> None:
    try:
        lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    try:
        shutil.rmtree(path.with_name(path.name.removesuffix(_LOCK)), ignore_errors=True)
        path.unlink()
        path.parent.rmdir()
    except OSError:
        pass  # the folder contains other snapshots of the run
    finally:
        os.close(lock)


def _locked(path: Path, mode: int) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, mode)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:
            pass  # removed in the meantime
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
