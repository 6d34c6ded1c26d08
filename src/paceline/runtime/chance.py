"""Random state without a framework, as bytes of one length: Python's, and numpy's where it is loaded.

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
    mine = _PYTHON.pack(*numbers, gauss is not None, gauss or 0.0)
    numpy = _numpy()
    if numpy is None:
        return mine + bytes(_NUMPY.size)
    known = numpy.random.get_state(legacy=False)
    key = known["state"]["key"].tolist()
    return mine + _NUMPY.pack(True, *key, known["state"]["pos"], known["has_gauss"], known["gauss"])


def load(saved: bytes) -> None:
    *numbers, has_gauss, gauss = _PYTHON.unpack(saved[: _PYTHON.size])
    random.setstate((3, tuple(numbers), gauss if has_gauss else None))
    there, *rest = _NUMPY.unpack(saved[_PYTHON.size :])
    numpy = _numpy()
    if there and numpy is not None:
        key, (position, has_gauss, gauss) = rest[:624], rest[624:]
        numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))


def derived(saved: bytes, rank: int, world: int) -> int:
    """A number made of what was saved and of the place in a group of another size: the same each time it is asked."""
    return int.from_bytes(hashlib.sha256(saved + f" {rank} {world}".encode()).digest()[:8], "little") >> 1


def seed(number: int) -> None:
    random.seed(number)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def _numpy() -> Any:
    """Where it is loaded and its global generator is the one it starts with."""
    numpy = sys.modules.get("numpy")
    if numpy is None or numpy.random.get_state(legacy=False)["bit_generator"] != "MT19937":
        return None
    return numpy
