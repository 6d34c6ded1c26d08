"""The environment of commands that tests start."""

from __future__ import annotations

import os

from paceline.frameworks import amx


def without(*prefixes: str) -> dict[str, str]:
    """The environment of this process less the variables that begin so.

    What the AMX probe is made to say stays, whatever the prefixes; what conftest.py has set because of its answer does
    not: Paceline has to find out by itself.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name == amx.OVERRIDE or (not name.startswith(prefixes) and (name, value) != (amx.VARIABLE, amx.LIMIT))
    }
