"""The folders of functions that were submitted: written before their runs start, removed with their last run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import PacelineError
from paceline.job.values import slug
from paceline.storage.local_files import remove_tree
from paceline.view.files import run_folders

_FOLDER = "functions"  # beside that of the runs
_NAME = re.compile(r".+-[0-9a-f]{12}")
_FILES = re.compile(r"function\.(py|pickle)|\.function\..*|__pycache__")  # that a folder may contain
_LOCK = ".lock"  # shared by those who submit a function; whoever removes folders needs it alone


@contextmanager
def submitting() -> Iterator[None]:
    """Nobody removes a folder in the meantime: a function is written before the run exists that uses it."""
    folder = run_folders.home() / _FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _open_lock(folder)
    except OSError as error:
        raise _not_written(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def write(name: str, contents: Mapping[str, bytes]) -> Path:
    """The folder with these files, which all runs of the same function share."""
    digest = hashlib.sha256(b"".join(b"%d:%s" % (len(data), data) for data in contents.values())).hexdigest()[:12]
    folder = run_folders.home() / _FOLDER / f"{slug(name) or 'function'}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file, data in contents.items():
            partial = folder / f".{file}.{os.urandom(6).hex()}"
            partial.write_bytes(data)
            partial.replace(folder / file)
    except OSError as error:
        raise _not_written(folder, error) from None
    return folder


def remove_unused(home: Path) -> None:
    """Removes the folders that no run uses. Does nothing while a function is submitted, or if it is unknown what a run
    uses. `home`: the folder with the folder of runs; the user may have folders of their own there."""
    with suppress(OSError):  # another user's, or a full disk: the next command tries again
        folders = [entry for entry in (home / _FOLDER).iterdir() if _is_of_a_function(entry)]
        if folders:
            _remove_unused(folders, home)


def _is_of_a_function(folder: Path) -> bool:
    if not _NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    return all(_FILES.fullmatch(entry.name) for entry in folder.iterdir())


def _remove_unused(folders: list[Path], home: Path) -> None:
    lock = _open_lock(home / _FOLDER)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        used = _used_names(home / "runs")
        for folder in folders:
            if used is not None and folder.name not in used:
                remove_tree(str(folder), ignore_errors=True)
    finally:
        os.close(lock)


def _used_names(runs: Path) -> set[str] | None:
    """The names of the folders that runs of this user have their code in; None: it is unknown what one of them uses.

    Only names are compared: they contain a digest, and PACELINE_HOME may have been another path to the same folder. A
    run that another user has submitted has no functions here, whatever its plan says."""
    used = set()
    for run in runs.iterdir() if runs.is_dir() else ():
        if run.name.startswith(".") or not run.is_dir() or run_folders.deleted(run) or _is_of_others(run):
            continue
        code = run_folders.plan(run).get("code")
        if not isinstance(code, str):
            return None
        used.add(Path(code).name)
    return used


def _is_of_others(run: Path) -> bool:
    """False also if run.json is damaged."""
    return bool(run_folders.info(run)) and not run_folders.is_own(run)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _not_written(folder: Path, error: OSError) -> PacelineError:
    return PacelineError(
        f"the function cannot be written to {folder}: {error.strerror or error}",
        remedy="set PACELINE_HOME to another folder",
    )
