"""Damages files the way disks, other versions and people do: seeded, so that a failure can be repeated."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**63, 10**400, 0.5, 1e308, float("inf"), float("-inf"), float("nan"), "", "x", "1",
    "\ud800", "\0", "../..", "2026-11-15T04:30:00.000Z", "0001-01-01T00:00:00", "9999-12-31T23:59:59", "yesterday",
    [], {}, [[]], [None], [1, 2], ["a", "b"], {"a": 1}, {"": {}}, [{}], "long" * 5000,
)  # fmt: skip
GARBAGE = (b"\0", b"\xff\xfe", b"\n", b"{", b"]", b'"', b"1e400", b"NaN", b"\0" * 4096, b"[" * 5000, b'{"a":' * 3000)


def seconds(default: float) -> float:
    """How long to fuzz: PACELINE_FUZZ_SECONDS, for hours by hand."""
    return float(os.environ.get("PACELINE_FUZZ_SECONDS") or default)


def first_seed() -> int:
    """PACELINE_FUZZ_SEED repeats a failure."""
    return int(os.environ.get("PACELINE_FUZZ_SEED") or time.time() * 1000 % 10**9)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Data like this, with some damage: in one value of its JSON, or in its bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        data = (_mutate_json if rng.random() < 0.7 else _mutate_bytes)(data, rng)
    return data


def _mutate_json(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:  # one JSON object a line
        lines[at] = _dumps(_with_damage(json.loads(lines[at]), rng))
        return b"\n".join(lines)
    except (ValueError, RecursionError):
        pass
    try:
        return _dumps(_with_damage(json.loads(data), rng))
    except (ValueError, RecursionError):
        return _mutate_bytes(data, rng)


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _with_damage(value: Any, rng: random.Random) -> Any:
    places = list(_places(value))
    if not places or rng.random() < 0.05:
        return rng.choice(VALUES)
    container, key = rng.choice(places)
    action = rng.random()
    if action < 0.2:
        del container[key]
    elif action < 0.3 and isinstance(container, dict):
        container[rng.choice(("unknown", "", "version", "\ud800"))] = rng.choice(VALUES)
    elif action < 0.35 and isinstance(container[key], int):
        container[key] += rng.choice((1, -1, 1000))
    else:
        container[key] = rng.choice(VALUES)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    actions: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + rng.choice(GARBAGE) + data[at:],
        lambda: data[:at] + rng.choice(GARBAGE) + data[at + 1 :],
        lambda: data[:at] + data[at + rng.randrange(1, 50) :],
        lambda: data + data,
        lambda: b"",
        lambda: rng.randbytes(100),
        lambda: data[:at] + b"x" * 2_000_000 + data[at:],
    )
    return rng.choices(actions, (3, 3, 3, 3, 3, 2, 2, 2, 0.1))[0]()


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file; returns how, for messages."""
    kind = rng.random()
    if kind < 0.9:
        path.write_bytes(mutated(path.read_bytes(), rng))
        return "contents"
    path.unlink()
    if kind < 0.94:
        return "removed"
    if kind < 0.97:
        path.mkdir()
        return "a folder"
    path.symlink_to(path)
    return "a link to itself"
