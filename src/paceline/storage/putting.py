"""Puts a snapshot back into the folder that a program keeps its own checkpoints in, before its tasks start.

All hosts of a machine share that folder and the run's own, where it is written down what has been done; pods share
neither. Whenever this ends, the folder holds what it held, or the snapshot, or is not there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.storage.snapshots import Unfit, always
from paceline.storage.store import Unwanted, Wanted
from paceline.storage.watched import ABOUT, Contents, Signature, contents, duplicate, leads_inside, remove, signature

_BEGUN = "begun.json"
TASKS = "tasks"  # the processes that may write to it: see Taking


def begin(
    folder: str,
    own: str,
    who: tuple[str, str],
    generation: int,
    source: str,
    inner: Iterable[str] = (),
    still: Wanted = always,
) -> tuple[dict[str, Signature], str]:
    """`own`: a folder of the run. `who`: the run and the host. `inner`: folders that must not be in it.

    `source`: a snapshot; empty: there is none, and what tasks of this run have left is put aside, unless the folder
    held something before them.

    The files that a task left which may have died while it wrote them, and where that is what was there before the run.
    """
    folder = os.path.realpath(folder)
    for path in inner:
        if f"{os.path.realpath(path)}/".startswith(f"{folder}/"):
            raise Unfit(f"{folder} holds more than checkpoints, as {path} is in it: name a folder of their own")
    if os.path.ismount(folder):
        raise Unfit(f"{folder} is where something is mounted, which cannot be replaced: name a folder in it")
    os.makedirs(own, exist_ok=True)
    with _alone(f"{own}/lock"):
        before = _read(f"{own}/{_BEGUN}")
        this = [generation, os.path.basename(source)]
        start = before.get("start", {})
        kept = ""
        if before and before["this"][0] > generation:
            raise Unwanted(f"generation {before['this'][0]} has begun here")
        if before.get("this") != this or (source and not os.path.isdir(folder)):
            if source:
                keep = not before or any(_only_here(folder, path, start[path], source) for path in start)
                kept, start = _replace(folder, own, who, source, keep, still), {}
            elif not before:
                start = {path: list(known) for path, known in contents(folder).files.items()}
            elif not start:
                _aside(folder, _names(folder, own, who)[1])
            remove(f"{own}/{TASKS}")  # they are all gone
            os.mkdir(f"{own}/{TASKS}")
            _write(own, this, start)
        found = Contents() if source else contents(folder)
        return {path: known for path, known in found.files.items() if list(known) != start.get(path)}, kept


def _only_here(folder: str, path: str, known: list[int], source: str) -> bool:
    """Whether that file is as it was before the run, and not in the snapshot."""
    try:
        if list(signature(os.stat(f"{folder}/{path}", follow_symlinks=False))) != known:
            return False
        return os.stat(f"{source}/{path}").st_size != known[2]
    except FileNotFoundError:
        return os.path.exists(f"{folder}/{path}")


def tidy(folder: str, own: str, who: tuple[str, str]) -> None:
    """The run is over."""
    folder = os.path.realpath(folder)
    for room in (os.path.dirname(folder), own):
        for name in _hidden(folder, who):
            remove(f"{room}/{name}")
    remove(own)


def _replace(folder: str, own: str, who: tuple[str, str], source: str, keep: bool, still: Wanted) -> str:
    """`keep`: what is there is not of this run, and stays under the name that is returned."""
    above, name = os.path.split(folder)
    os.makedirs(above, exist_ok=True)
    new, old = _names(folder, own, who)
    remove(new)
    try:
        _copy(source, new, still)
    except BaseException:
        remove(new)
        raise
    kept = ""
    if keep and os.path.lexists(folder) and not _is_empty(folder):
        kept = old = _free(f"{above}/{name}.before-{who[0]}")
    _aside(folder, old)
    _write(own, [0, ""], {})  # what is there from here on is of this run
    try:
        os.rename(new, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove(new)  # a shared volume, and another host has put the same there
    return kept


def _aside(folder: str, old: str) -> None:
    remove(old)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, old)


def _names(folder: str, own: str, who: tuple[str, str]) -> tuple[str, str]:
    """For what comes and what goes: in the run's own folder where that is on the same file system, else beside."""
    above = os.path.dirname(folder)
    new, old = _hidden(folder, who)
    try:
        os.makedirs(f"{own}/{new}", exist_ok=True)
        os.rename(f"{own}/{new}", f"{above}/{new}")
        remove(f"{above}/{new}")
        return f"{own}/{new}", f"{own}/{old}"
    except OSError:
        remove(f"{own}/{new}")
        return f"{above}/{new}", f"{above}/{old}"


def _hidden(folder: str, who: tuple[str, str]) -> tuple[str, str]:
    """Of this host alone: it may share a volume with others."""
    name = f".{os.path.basename(folder)}.{'.'.join(who)}"
    return f"{name}.new", f"{name}.old"


def _copy(source: str, target: str, still: Wanted) -> None:
    """Its files in the order in which they were written, with these times: programs look for the newest."""
    told = _read(f"{source}/{ABOUT}").get("watched")
    times, links = _of(told, "times", int), _of(told, "links", str)
    found = contents(source)
    os.makedirs(target)
    for path in sorted((*found.files, *found.logs), key=lambda path: (times.get(path, 0), path)):
        os.makedirs(os.path.dirname(f"{target}/{path}"), exist_ok=True)
        duplicate(f"{source}/{path}", f"{target}/{path}", still)
        if path in times:
            os.utime(f"{target}/{path}", ns=(times[path], times[path]))
    for path, to in links.items():
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            if leads_inside(path, to):
                os.makedirs(os.path.dirname(f"{target}/{path}"), exist_ok=True)
                os.symlink(to, f"{target}/{path}")


def _of(told: Any, name: str, kind: type) -> dict[str, Any]:
    found = told.get(name) if isinstance(told, dict) else None
    return {path: each for path, each in found.items() if type(each) is kind} if isinstance(found, dict) else {}


def _is_empty(folder: str) -> bool:
    return os.path.isdir(folder) and not os.listdir(folder)


def _free(name: str) -> str:
    return next(each for each in (name, *(f"{name}-{n}" for n in range(2, 1000))) if not os.path.lexists(each))


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            found = json.load(file)
            return found if isinstance(found, dict) else {}
    except (FileNotFoundError, ValueError):
        return {}


def _write(own: str, this: list[Any], start: dict[str, list[int]]) -> None:
    path = f"{own}/{_BEGUN}"
    with open(f"{path}.partial", "w") as file:
        json.dump({"this": this, "start": start}, file)
    os.replace(f"{path}.partial", path)
