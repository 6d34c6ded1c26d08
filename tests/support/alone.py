"""Runs a test that imports a framework in its own process: two frameworks in one process may crash it."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def alone(test: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **fixtures: P.kwargs) -> None:
        if os.environ.get("ALONE"):
            test(*args, **fixtures)
            return
        limit = 200 + float(os.environ.get("PACELINE_FUZZ_SECONDS", "0"))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", f"{inspect.getfile(test)}::{test.__name__}"]
        result = subprocess.run(command, env={**inherited, "ALONE": "1"}, capture_output=True, text=True, timeout=limit)
        assert result.returncode == 0, result.stdout[-4000:]

    return run
