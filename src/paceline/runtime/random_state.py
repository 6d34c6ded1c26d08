"""Random state without a framework, as bytes of fixed length: Python's, and numpy's if it is loaded.

>>> import random
>>> before = state()
>>> first = random.random()
>>> load(before)
>>> random.random() == first
True
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from typing import Any

_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<?624IIId")
SIZE = _PYTHON.size + _NUMPY.size


def state() -> bytes:
    _, numbers, gauss = random.getstate()
    python_state = _PYTHON.pack(*numbers, gauss is not None, gauss or 0.0)
    numpy = _numpy()
    if numpy is None:
        return python_state + bytes(_NUMPY.size)
    numpy_state = numpy.random.get_state(legacy=False)
    mt19937 = numpy_state["state"]
    key, position = mt19937["key"].tolist(), mt19937["pos"]
    return python_state + _NUMPY.pack(True, *key, position, numpy_state["has_gauss"], numpy_state["gauss"])


def load(saved: bytes) -> None:
    *numbers, has_gauss, gauss = _PYTHON.unpack(saved[: _PYTHON.size])
    random.setstate((3, tuple(numbers), gauss if has_gauss else None))
    has_numpy, *values = _NUMPY.unpack(saved[_PYTHON.size :])
    numpy = _numpy()
    if has_numpy and numpy is not None:
        key, (position, has_gauss, gauss) = values[:624], values[624:]
        numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))


def derived(saved: bytes, rank: int, world: int) -> int:
    """A seed for a group of another size: depends only on the saved state, the rank and the world size."""
    return int.from_bytes(hashlib.sha256(saved + f" {rank} {world}".encode()).digest()[:8], "little") >> 1


def seed(number: int) -> None:
    random.seed(number)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def _numpy() -> Any:
    """numpy, if it is loaded and its global generator is of the default kind."""
    numpy = sys.modules.get("numpy")
    if numpy is None or numpy.random.get_state(legacy=False)["bit_generator"] != "MT19937":
        return None
    return numpy
