"""Ports that no other test and no agent chooses: a test often listens on its port only seconds later."""

from __future__ import annotations

import os
import random
import socket

_PORTS = (10000, 20000)  # below those that agents choose
_PROCESSES = 16
_count = (_PORTS[1] - _PORTS[0]) // _PROCESSES
_index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _PROCESSES
_next = random.SystemRandom().randrange(_count)  # another pytest may run beside this one


def free_port() -> int:
    """Each process of pytest has its own ports, and uses all of them before it returns one again."""
    global _next
    for _ in range(_count):
        _next = (_next + 1) % _count
        port = _PORTS[0] + _index * _count + _next
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise OSError("no port is free")
