"""The environment of commands that tests start."""

from __future__ import annotations

import os

from paceline.frameworks import amx_probe


def without(*prefixes: str) -> dict[str, str]:
    """The environment of this process without the variables that have one of these prefixes.

    An override of the AMX probe is always kept. The variable that conftest.py sets from the result of the probe is
    removed, because Paceline has to detect it on its own; unless the override contradicts the probe: then frameworks
    need it.
    """
    is_contradicted = os.environ.get(amx_probe.OVERRIDE, amx_probe.TRAPS) != amx_probe.TRAPS
    detectable = () if is_contradicted else ((amx_probe.VARIABLE, amx_probe.LIMIT),)
    return {
        name: value
        for name, value in os.environ.items()
        if name == amx_probe.OVERRIDE or (not name.startswith(prefixes) and (name, value) not in detectable)
    }
