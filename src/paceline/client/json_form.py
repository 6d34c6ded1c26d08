"""The JSON form of what the client returns: the same from `to_dict()` and from the command line with `-o json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import SCHEMA_VERSION


def versioned(fields: Mapping[str, Any]) -> dict[str, Any]:
    """These fields as a dictionary for JSON, with the version of their schema."""
    return {"schema_version": SCHEMA_VERSION, **finite(dict(fields))}


def finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: they become null. Tuples become lists."""
    if isinstance(data, float):
        return data if data - data == 0 else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, (list, tuple)) else data
