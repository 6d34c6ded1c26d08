"""JSON that others may have written, such as tasks, members and other users: it cannot end or block its reader."""

from __future__ import annotations

import json
import sys
from typing import Any, Callable

from paceline.storage.regular_files import open_regular

DEEPEST = 50  # levels of nesting: more than any message or file of a run has, and no problem for recursive functions
_MOST_DIGITS = 4300  # of an integer, as in newer versions of Python


def _parse_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it contains an integer of more than {_MOST_DIGITS} digits")
    return int(digits)


# Older versions have no limit, and take minutes for a million digits.
_INT_PARSER: Callable[[str], int] | None = None if hasattr(sys, "set_int_max_str_digits") else _parse_int


def parse_json(data: bytes | bytearray | str) -> Any:
    """ValueError: it is not JSON, is nested too deeply for the parser, or contains an enormous integer."""
    try:
        return json.loads(data, parse_int=_INT_PARSER)
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
