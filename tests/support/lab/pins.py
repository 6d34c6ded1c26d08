"""Selects from the project's locked Python packages those for an image: the requested ones and their dependencies."""

from __future__ import annotations

import re
from collections.abc import Sequence

from support.lab.places import PROJECT

LOCKED = PROJECT / "requirements/dev.txt"


def needed(*names: str) -> str:
    """The lines of the lock file for these packages and their dependencies, with versions and checksums."""
    blocks = _blocks()
    chosen = set(names)
    missing = chosen - {_name(block) for block in blocks}
    if missing:
        raise ValueError(f"{LOCKED.name} does not lock {', '.join(sorted(missing))}")
    while more := {_name(block) for block in blocks if chosen & _required_by(block)} - chosen:
        chosen |= more
    return "".join(block for block in blocks if _name(block) in chosen)


def _blocks() -> Sequence[str]:
    """The entries of the lock file: a package, its checksums, and a comment that lists the packages that require it."""
    return re.findall(r"^[a-z0-9][^\n]*\n(?:[ ]+[^\n]*\n)*", LOCKED.read_text(), re.MULTILINE)


def _name(block: str) -> str:
    return block.split("==")[0]


def _required_by(block: str) -> set[str]:
    comments = [line.strip(" #") for line in block.splitlines() if line.lstrip().startswith("#")]
    return set(" ".join(comments).removeprefix("via").split())
