"""Shared by all tests: settings of their libraries, and the fixtures of object stores."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType

from hypothesis import settings

from paceline.frameworks import amx

# Where it is ignored, as by what a shell starts in the background, no process of these tests would take a Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["support.stores.fixtures"]

# `python` is that of these tests: a machine may have none, or another, by that name.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# For frameworks that tests start themselves: Paceline's own tasks are given it by Paceline.
os.environ.update(amx.environment(os.environ))

# The same examples in every run; `--hypothesis-profile default` looks further, with a new seed each time.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# With this module TensorBoard reads with code of its own; else it imports TensorFlow, which crashes beside torch.
sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")


def pytest_runtest_teardown() -> None:
    assert "tensorflow" not in sys.modules or "ALONE" in os.environ, "TensorFlow is in the test process: see alone.py"
