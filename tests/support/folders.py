"""Folders of code as tests make them, and what of one would be sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.backends.kubernetes.code import collect


def make(folder: Path, *paths: str) -> Path:
    """Empty files, and folders where a path ends in /."""
    for path in paths:
        place = folder / path
        if path.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    return folder


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        make(folder, path)
        (folder / path).write_text(text)
    return folder


def sent(folder: Path) -> set[str]:
    return {file.path for file in collect(folder).files}
