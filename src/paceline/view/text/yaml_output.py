"""Plain data as YAML, with reproducible bytes, and without loading a YAML library, which is slow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_RESERVED = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def dump(data: Any) -> str:
    """
    >>> print(dump({"name": "digits", "command": ["python", "5"], "env": {}}), end="")
    name: digits
    command:
    - python
    - "5"
    env: {}
    """
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            if _nested(value):
                yield f"{_scalar(str(key))}:"
                indent = "" if isinstance(value, list) else "  "
                yield from (indent + line for line in _lines(value))
            else:
                yield f"{_scalar(str(key))}: {_scalar(value)}"
    elif isinstance(data, list) and data:
        for value in data:
            first = True
            for line in _lines(value):
                yield ("- " if first else "  ") + line
                first = False
    else:
        yield _scalar(data)


def _nested(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _RESERVED
        return value if plain else json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)
