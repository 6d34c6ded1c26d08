"""The command line of Paceline, with a lease that is shorter than usual: tests that lose hosts wait for it."""

from __future__ import annotations

import sys

LEASE_S = 7.0  # other hosts must not be lost when the machine is busy


def with_lease(seconds: float) -> list[str]:
    program = f"""
import functools, sys
from paceline.backends.local import supervisor
from paceline.cli import main
supervisor.Options = functools.partial(supervisor.Options, lease={seconds})
sys.argv[0] = "paceline"
sys.exit(main())
"""
    return [sys.executable, "-c", program]


SHORT = with_lease(LEASE_S)
