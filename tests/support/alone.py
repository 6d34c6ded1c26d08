"""Tests that import a framework: each runs in a process of its own, since two frameworks in one may crash it."""

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
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", f"{inspect.getfile(test)}::{test.__name__}"]
        done = subprocess.run(words, env={**kept, "ALONE": "1"}, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-4000:]

    return run
