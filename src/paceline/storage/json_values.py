"""JSON that others may have written, such as tasks, members and other users: it cannot end or block its reader."""

from __future__ import annotations

import json
from typing import Any

from paceline.storage.regular_files import open_regular

DEEPEST = 50  # levels of nesting: more than any message or file of a run has, and no problem for recursive functions


def parse_json(data: bytes | bytearray | str) -> Any:
    """ValueError: it is not JSON, or is nested too deeply for the parser."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str) -> Any:
    """The value in a file; symbolic links are followed. OSError: it is missing or not a regular file. ValueError: it is
    not JSON."""
    with open(open_regular(path, follow=True), "rb") as file:
        return parse_json(file.read())


def is_deep(value: Any) -> bool:
    """Whether it is nested deeper than DEEPEST levels."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        depth, level = (
            depth + 1,
            [
                inner
                for each in level
                if isinstance(each, (dict, list))
                for inner in (each.values() if isinstance(each, dict) else each)
                if isinstance(inner, (dict, list))
            ],
        )
    return depth > DEEPEST
