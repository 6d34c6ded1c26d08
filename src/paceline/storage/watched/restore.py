"""Restores a snapshot into the folder in which a program keeps its own checkpoints, before its tasks start.

If only some files of a folder are watched, only these are replaced.

All hosts on a machine share that folder and the run's own folder, in which progress is recorded; pods share neither.
Whenever this process is killed, the folder has its old contents, or the snapshot, or does not exist; of files, some may
be missing until the next attempt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.storage.json_values import read_json
from paceline.storage.snapshots.manifest import INVALID_FIELDS
from paceline.storage.snapshots.repository import Unfit, always
from paceline.storage.stores.protocol import ContinueCheck, TransferCanceled
from paceline.storage.watched.folder_contents import (
    ABOUT,
    Contents,
    Signature,
    contents,
    duplicate,
    leads_inside,
    remove,
    signature,
)
from paceline.storage.watched.selection import Selection, label, select

_BEGUN = "begun.json"
TASKS = "tasks"  # the processes that may write to the folder: see FolderCapture


def begin(
    path: str,
    own: str,
    owner: tuple[str, str],
    generation: int,
    source: str,
    inner: Iterable[str] = (),
    should_continue: ContinueCheck = always,
) -> tuple[dict[str, Signature], str]:
    """`path`: a folder, a file, or a folder with a pattern of names of files. `own`: a folder of the run. `owner`: the
    run and the host. `inner`: folders that must not be in a folder that is replaced.

    `source`: a snapshot; empty: none, and what tasks of this run have left is moved aside, unless the folder had
    contents before the run.

    Return the files of tasks that may have died while writing them, and the folder to which contents from before the
    run were moved.
    """
    selection = select(path, source)
    folder = selection.folder
    if not selection.pattern:
        _check_replaceable(folder, inner)
    os.makedirs(own, exist_ok=True)
    with _locked(f"{own}/lock"):
        record = _read_begun(f"{own}/{_BEGUN}")
        this = [generation, os.path.basename(source)]
        start = record.get("start", {})
        backup = ""
        if record and record["this"][0] > generation:
            raise TransferCanceled(f"generation {record['this'][0]} has already started here")
        if record.get("this") != this or (source and not _exists(selection)):
            if source:
                keep = not record or any(_only_here(folder, name, start[name], source) for name in start)
                backup = _replace(selection, label(path), own, owner, source, keep, should_continue)
                start = {}
            elif not record:
                start = {name: list(signature) for name, signature in _scan(selection).files.items()}
            elif not start:
                _move_aside(selection, _names(_target(selection, label(path)), own, owner)[1])
            remove(f"{own}/{TASKS}")  # they have all ended
            os.mkdir(f"{own}/{TASKS}")
            _write(own, this, start)
        files = ({} if source else _scan(selection).files).items()
        return {name: signature for name, signature in files if list(signature) != start.get(name)}, backup


def _check_replaceable(folder: str, inner: Iterable[str]) -> None:
    for path in inner:
        if f"{os.path.realpath(path)}/".startswith(f"{folder}/"):
            raise Unfit(
                f"{folder} contains more than checkpoints: {path} is in it; use a separate folder for checkpoints, or "
                "watch only some files, such as *.pt"
            )
    if os.path.ismount(folder):
        raise Unfit(f"{folder} is a mount point, which cannot be replaced; use a folder in it")


def _scan(selection: Selection) -> Contents:
    return contents(selection.folder, selection.pattern)


def _exists(selection: Selection) -> bool:
    return bool(_scan(selection).files) if selection.pattern else os.path.isdir(selection.folder)


def _target(selection: Selection, name: str) -> str:
    """The path next to which temporary and backup folders are created. `name`: the label of what is watched."""
    return f"{selection.folder}/{name}" if selection.pattern else selection.folder


def _only_here(folder: str, path: str, before: list[int], source: str) -> bool:
    """Whether the file is unchanged since before the run, and not in the snapshot."""
    try:
        if list(signature(os.stat(f"{folder}/{path}", follow_symlinks=False))) != before:
            return False
        return os.stat(f"{source}/{path}").st_size != before[2]
    except FileNotFoundError:
        return os.path.exists(f"{folder}/{path}")


def tidy(path: str, own: str, owner: tuple[str, str], keep_record: bool = False) -> None:
    """Remove temporary folders at the end of the run. `keep_record`: the run is paused, and the contents of the folder
    are still its own when it is resumed."""
    target = _target(select(path), label(path))
    for parent in (os.path.dirname(target), own):
        for name in _hidden(target, owner):
            remove(f"{parent}/{name}")
    if not keep_record:
        remove(own)
        return
    with contextlib.suppress(FileNotFoundError):  # another host of this machine tidies, too
        for name in os.listdir(own):
            if name != _BEGUN:
                remove(f"{own}/{name}")


def _replace(
    selection: Selection,
    name: str,
    own: str,
    owner: tuple[str, str],
    source: str,
    keep: bool,
    should_continue: ContinueCheck,
) -> str:
    """`name`: the label of what is watched. `keep`: the contents are not of this run; they are moved to the folder that
    is returned."""
    target = _target(selection, name)
    parent = os.path.dirname(target)
    os.makedirs(parent, exist_ok=True)
    new, old = _names(target, own, owner)
    remove(new)
    try:
        _copy(source, new, should_continue)
    except BaseException:
        remove(new)
        raise
    names = _matching(new, selection.pattern, source) if selection.pattern else []
    backup = ""
    if keep and _has_contents(selection):
        backup = old = _free_name(f"{target}.before-{owner[0]}")
    _move_aside(selection, old)
    _write(own, [0, ""], {})  # from here on, the contents belong to this run
    if selection.pattern:
        for each in names:
            os.replace(f"{new}/{each}", f"{selection.folder}/{each}")
        remove(new)
        return backup
    try:
        os.rename(new, selection.folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove(new)  # a shared volume, and another host has restored the same snapshot
    return backup


def _matching(copy: str, pattern: str, source: str) -> list[str]:
    scan = contents(copy, pattern)
    names = [*scan.files, *scan.logs, *scan.links]
    if not names:
        raise Unfit(f"{source} contains no file that matches {pattern}")
    return names


def _move_aside(selection: Selection, old: str) -> None:
    remove(old)
    if not selection.pattern:
        with contextlib.suppress(FileNotFoundError):
            os.rename(selection.folder, old)
        return
    scan = _scan(selection)
    for name in (*scan.files, *scan.logs, *scan.links):
        os.makedirs(old, exist_ok=True)
        os.rename(f"{selection.folder}/{name}", f"{old}/{name}")


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


def _has_contents(selection: Selection) -> bool:
    if selection.pattern:
        return _scan(selection) != Contents()
    folder = selection.folder
    return os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder))


def _free_name(name: str) -> str:
    return next(each for each in (name, *(f"{name}-{n}" for n in range(2, 1000))) if not os.path.lexists(each))


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: str) -> dict[str, Any]:
    try:
        fields = read_json(path)
        return fields if isinstance(fields, dict) else {}
    except (FileNotFoundError, ValueError):
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
