"""The fingerprint of an ingest: changes when the command, or an input of it, changes."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from paceline.plan import BUCKETS
from paceline.storage.local_files import digest
from paceline.storage.snapshots.repository import always

VERSION = 1
LENGTH = 16  # characters of a fingerprint
_CACHE = "__pycache__"  # written by running the program

Listing = Callable[[str], Iterable[Sequence[Any]]]  # lists an address in a bucket: names, each with size and tag


class MissingInput(Exception):
    """An input does not exist; the text names it and the folder that was searched."""


def fingerprint(
    command: Sequence[str],
    inputs: Sequence[str] | None,
    folder: str,
    environment: Mapping[str, str],
    listing: Listing,
    without: str = "",
) -> str:
    """`folder`: the code folder. `without`: a folder or an address that is not an input: the data is written there."""
    entries: list[Any] = []
    for each in named(command, folder, without) if inputs is None else inputs:
        if each.startswith("$"):
            entries.append(["variable", each[1:], environment.get(each[1:])])
        elif each.startswith(BUCKETS):
            objects = sorted(list(map(str, item)) for item in listing(each))
            if not objects and inputs is not None:
                raise MissingInput(f"ingest.inputs: nothing exists at {each}")
            entries.append(["bucket", each, objects])
        else:
            for path in match(each, folder):
                full = os.path.join(folder, path)
                if not without or not f"{os.path.realpath(full)}/".startswith(f"{os.path.realpath(without)}/"):
                    entries.append(["file", path, *digest(full, always)])
    fields = {"version": VERSION, "command": list(command), "inputs": sorted(entries, key=json.dumps)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:LENGTH]


def named(command: Sequence[str], folder: str, without: str = "") -> list[str]:
    """Inputs that a command names: files and folders of the code, Python modules (-m), and addresses in buckets."""
    inputs = []
    for before, word in zip(("", *command), command):
        if word.startswith(BUCKETS):
            if not without or not f"{word}/".startswith(f"{without}/"):
                inputs.append(word)
            continue
        below = word.replace(".", "/") if before == "-m" else word
        for path in (below, f"{below}.py") if before == "-m" else (below,):
            steps = os.path.normpath(path).split("/")
            if not path.startswith("/") and steps[0] not in ("", ".", "..") and os.path.exists(f"{folder}/{path}"):
                inputs.append(path)
    return inputs


def match(pattern: str, folder: str) -> list[str]:
    """The files in `folder` that match, including all files below a matching folder, sorted. Empty for inputs that are
    not files."""
    if pattern.startswith(("$", *BUCKETS)):
        return []
    full = os.path.join(glob.escape(folder), pattern)
    files: set[str] = set()
    for path in glob.glob(full, recursive=True):
        files.update(_files_below(path) if os.path.isdir(path) else [path])
    if not files and not os.path.isdir(os.path.join(folder, pattern)):
        raise MissingInput(f"ingest.inputs: nothing matches {pattern} in {folder}")
    return sorted(os.path.relpath(path, folder) if not pattern.startswith("/") else path for path in files)


def _files_below(folder: str) -> list[str]:
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != _CACHE]
        paths += [f"{parent}/{name}" for name in files]
    return paths
