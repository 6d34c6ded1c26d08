"""Writes job data as readable YAML."""

from __future__ import annotations

import re
from typing import Any

from paceline.job.yaml_tree import scalar

WIDTH = 100
_PLAIN = re.compile(r"(?:[A-Za-z0-9_./]|--?[A-Za-z0-9])[A-Za-z0-9_./@%+=~^-]*(?:[:@][A-Za-z0-9_./@%+=~^-]+)*", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-")


def write(data: dict[str, Any]) -> str:
    """The YAML text of a job. Reading it gives the same data.

    >>> print(write({"name": "a", "command": ["python", "t.py", "3"], "roles": {"worker": {"replicas": 2}}}), end="")
    name: a
    command: [python, t.py, "3"]
    roles:
      worker: {replicas: 2}
    """
    return "".join(_entry(key, value, 0) for key, value in data.items())


def _entry(key: str, value: Any, depth: int) -> str:
    indent = "  " * depth
    flow = _flow(value)
    # Roles and variables get one line each; other values stay on one line if they fit.
    block = isinstance(value, dict) and value and (depth == 0 and key in ("roles", "env"))
    if not block and len(indent) + len(key) + len(flow) < WIDTH:
        return f"{indent}{_word(key)}: {flow}\n"
    if isinstance(value, dict) and value:
        return f"{indent}{_word(key)}:\n" + "".join(_entry(inner, item, depth + 1) for inner, item in value.items())
    if isinstance(value, list) and value:
        return f"{indent}{_word(key)}:\n" + "".join(f"{indent}  - {_flow(item)}\n" for item in value)
    return f"{indent}{_word(key)}: {flow}\n"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_word(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    return _word(value) if isinstance(value, str) else repr(value)


def _word(word: str) -> str:
    if _PLAIN.fullmatch(word) and isinstance(scalar(word), str) and not _DATE.match(word):
        return word
    return '"' + "".join(map(_escaped, word)) + '"'


def _escaped(char: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if char in escapes:
        return escapes[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
