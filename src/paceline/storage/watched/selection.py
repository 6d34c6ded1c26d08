"""What `snapshots.watch` names: a folder, one file, or the files of a folder whose names match a pattern."""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass
from typing import Any

from paceline.storage.json_values import read_json
from paceline.storage.watched.folder_contents import ABOUT

_PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Selection:
    folder: str
    pattern: str = ""  # of names of files in the folder; empty: everything in the folder


def is_pattern(name: str) -> bool:
    return _PATTERN.search(name) is not None


def select(path: str, source: str = "") -> Selection:
    """What `path` names: a pattern, if its last part is one; otherwise a file or a folder, whichever exists there.

    `source`: a snapshot that is about to be restored, which decides between file and folder.
    """
    folder, name = os.path.split(path)
    if is_pattern(name):
        return Selection(os.path.realpath(folder), name)
    if _has_file(source, name) if source else os.path.isfile(path):
        return Selection(os.path.realpath(folder), re.sub(r"([*?\[])", r"[\1]", name))
    return Selection(os.path.realpath(path))


def _has_file(source: str, name: str) -> bool:
    """Whether the snapshot was taken of files and not of a folder; a folder that is not a snapshot: whether it contains
    that file and nothing else."""
    about = _read_about(source)
    if about is not None:
        return about.get("files") is True
    try:
        return [each for each in os.listdir(source) if each != ABOUT] == [name] and os.path.isfile(f"{source}/{name}")
    except OSError:
        return False


def _read_about(source: str) -> dict[str, Any] | None:
    try:
        watched = read_json(f"{source}/{ABOUT}").get("watched")
        return watched if isinstance(watched, dict) else None
    except (OSError, ValueError, AttributeError):
        return None


def is_empty(path: str) -> bool:
    """Whether there is nothing to capture. A folder that contains only empty folders is not detected."""
    selection = select(path)
    try:
        with os.scandir(selection.folder) as entries:
            return not any(not selection.pattern or fnmatch.fnmatchcase(e.name, selection.pattern) for e in entries)
    except OSError:
        return True


def label(path: str) -> str:
    """A name for temporary and backup folders."""
    name = os.path.basename(path)
    return re.sub(r"[^\w.-]+", "_", name) if is_pattern(name) else name
