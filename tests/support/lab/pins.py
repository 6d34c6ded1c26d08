"""Which of the project's locked Python packages an image gets: those it asks for and all that they need."""

from __future__ import annotations

import re
from collections.abc import Sequence

from support.lab.places import PROJECT

LOCKED = PROJECT / "requirements/dev.txt"


def needed(*wanted: str) -> str:
    """Their lines of the lock file, with versions and checksums."""
    blocks = _blocks()
    chosen = set(wanted)
    missing = chosen - {_name(block) for block in blocks}
    if missing:
        raise ValueError(f"{LOCKED.name} does not lock {', '.join(sorted(missing))}")
    while more := {_name(block) for block in blocks if chosen & _wanted_by(block)} - chosen:
        chosen |= more
    return "".join(block for block in blocks if _name(block) in chosen)


def _blocks() -> Sequence[str]:
    """A package with its checksums and the comment that says which others need it."""
    return re.findall(r"^[a-z0-9][^\n]*\n(?:[ ]+[^\n]*\n)*", LOCKED.read_text(), re.MULTILINE)


def _name(block: str) -> str:
    return block.split("==")[0]


def _wanted_by(block: str) -> set[str]:
    comments = [line.strip(" #") for line in block.splitlines() if line.lstrip().startswith("#")]
    return set(" ".join(comments).removeprefix("via").split())
