"""Restores a snapshot into the folder in which a program keeps its own checkpoints, before its tasks start.

All hosts on a machine share that folder and the run's own folder, in which progress is recorded; pods share neither.
Whenever this process is killed, the folder has its old contents, or the snapshot, or does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.storage.snapshots.manifest import INVALID_FIELDS
from paceline.storage.snapshots.repository import Unfit, always
from paceline.storage.stores.protocol import ContinueCheck, TransferCanceled
from paceline.storage.watched.folder_contents import (
    ABOUT,
    Signature,
    contents,
    duplicate,
    leads_inside,
    remove,
    signature,
)

_BEGUN = "begun.json"
TASKS = "tasks"  # the processes that may write to the folder: see FolderCapture


def begin(
    folder: str,
    own: str,
    owner: tuple[str, str],
    generation: int,
    source: str,
    inner: Iterable[str] = (),
    should_continue: ContinueCheck = always,
) -> tuple[dict[str, Signature], str]:
    """`own`: a folder of the run. `owner`: the run and the host. `inner`: folders that must not be in `folder`.

    `source`: a snapshot; empty: none, and what tasks of this run have left is moved aside, unless the folder had
    contents before the run.

    Return the files of tasks that may have died while writing them, and the folder to which contents from before the
    run were moved.
    """
    folder = os.path.realpath(folder)
    for path in inner:
        if f"{os.path.realpath(path)}/".startswith(f"{folder}/"):
            raise Unfit(
                f"{folder} contains more than checkpoints: {path} is in it; use a separate folder for checkpoints"
            )
    if os.path.ismount(folder):
        raise Unfit(f"{folder} is a mount point, which cannot be replaced; use a folder in it")
    os.makedirs(own, exist_ok=True)
    with _locked(f"{own}/lock"):
        record = _read_begun(f"{own}/{_BEGUN}")
        this = [generation, os.path.basename(source)]
        start = record.get("start", {})
        backup = ""
        if record and record["this"][0] > generation:
            raise TransferCanceled(f"generation {record['this'][0]} has already started here")
        if record.get("this") != this or (source and not os.path.isdir(folder)):
            if source:
                keep = not record or any(_only_here(folder, path, start[path], source) for path in start)
                backup, start = _replace(folder, own, owner, source, keep, should_continue), {}
            elif not record:
                start = {path: list(signature) for path, signature in contents(folder).files.items()}
            elif not start:
                _move_aside(folder, _names(folder, own, owner)[1])
            remove(f"{own}/{TASKS}")  # they have all ended
            os.mkdir(f"{own}/{TASKS}")
            _write(own, this, start)
        files = ({} if source else contents(folder).files).items()
        return {path: signature for path, signature in files if list(signature) != start.get(path)}, backup


def _only_here(folder: str, path: str, before: list[int], source: str) -> bool:
    """Whether the file is unchanged since before the run, and not in the snapshot."""
    try:
        if list(signature(os.stat(f"{folder}/{path}", follow_symlinks=False))) != before:
            return False
        return os.stat(f"{source}/{path}").st_size != before[2]
    except FileNotFoundError:
        return os.path.exists(f"{folder}/{path}")


def tidy(folder: str, own: str, owner: tuple[str, str]) -> None:
    """Remove temporary folders at the end of the run."""
    folder = os.path.realpath(folder)
    for parent in (os.path.dirname(folder), own):
        for name in _hidden(folder, owner):
            remove(f"{parent}/{name}")
    remove(own)


def _replace(
    folder: str, own: str, owner: tuple[str, str], source: str, keep: bool, should_continue: ContinueCheck
) -> str:
    """`keep`: the contents are not of this run; they are moved to the folder that is returned."""
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    new, old = _names(folder, own, owner)
    remove(new)
    try:
        _copy(source, new, should_continue)
    except BaseException:
        remove(new)
        raise
    backup = ""
    if keep and os.path.lexists(folder) and not _is_empty(folder):
        backup = old = _free_name(f"{parent}/{name}.before-{owner[0]}")
    _move_aside(folder, old)
    _write(own, [0, ""], {})  # from here on, the contents are of this run
    try:
        os.rename(new, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove(new)  # a shared volume, and another host has restored the same snapshot
    return backup


def _move_aside(folder: str, old: str) -> None:
    remove(old)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, old)


def _names(folder: str, own: str, owner: tuple[str, str]) -> tuple[str, str]:
    """Paths for the new and the old contents: in the run's own folder if it is on the same file system, else next to
    the folder."""
    parent = os.path.dirname(folder)
    new, old = _hidden(folder, owner)
    try:
        os.makedirs(f"{own}/{new}", exist_ok=True)
        os.rename(f"{own}/{new}", f"{parent}/{new}")
        remove(f"{parent}/{new}")
        return f"{own}/{new}", f"{own}/{old}"
    except OSError:
        remove(f"{own}/{new}")
        return f"{parent}/{new}", f"{parent}/{old}"


def _hidden(folder: str, owner: tuple[str, str]) -> tuple[str, str]:
    """Unique to this host: hosts may share a volume."""
    name = f".{os.path.basename(folder)}.{'.'.join(owner)}"
    return f"{name}.new", f"{name}.old"


def _copy(source: str, target: str, should_continue: ContinueCheck) -> None:
    """Copy files in the order in which they were written, with their times: programs look for the newest."""
    watched = _read(f"{source}/{ABOUT}").get("watched")
    times, links = _entries(watched, "times", int), _entries(watched, "links", str)
    scan = contents(source)
    os.makedirs(target)
    for path in sorted((*scan.files, *scan.logs), key=lambda path: (times.get(path, 0), path)):
        os.makedirs(os.path.dirname(f"{target}/{path}"), exist_ok=True)
        duplicate(f"{source}/{path}", f"{target}/{path}", should_continue)
        if path in times:
            os.utime(f"{target}/{path}", ns=(times[path], times[path]))
    for path, to in links.items():
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            if leads_inside(path, to):
                os.makedirs(os.path.dirname(f"{target}/{path}"), exist_ok=True)
                os.symlink(to, f"{target}/{path}")


def _entries(watched: Any, name: str, kind: type) -> dict[str, Any]:
    entries = watched.get(name) if isinstance(watched, dict) else None
    return {path: each for path, each in entries.items() if type(each) is kind} if isinstance(entries, dict) else {}


def _is_empty(folder: str) -> bool:
    return os.path.isdir(folder) and not os.listdir(folder)


def _free_name(name: str) -> str:
    return next(each for each in (name, *(f"{name}-{n}" for n in range(2, 1000))) if not os.path.lexists(each))


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            fields = json.load(file)
            return fields if isinstance(fields, dict) else {}
    except (FileNotFoundError, ValueError, RecursionError):
        return {}


def _read_begun(path: str) -> dict[str, Any]:
    """{}: nothing has begun here, or the record is damaged; files of the user are then kept."""
    record = _read(path)
    try:
        generation, source = record["this"]
        start = {str(name): [int(each) for each in signature] for name, signature in record["start"].items()}
        return {"this": [int(generation), str(source)], "start": start}
    except INVALID_FIELDS:
        return {}


def _write(own: str, this: list[Any], start: dict[str, list[int]]) -> None:
    path = f"{own}/{_BEGUN}"
    with open(f"{path}.partial", "w") as file:
        json.dump({"this": this, "start": start}, file)
    os.replace(f"{path}.partial", path)
