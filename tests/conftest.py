"""Setup shared by all tests: library settings and the object store fixtures."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType

from hypothesis import settings

from paceline.frameworks import amx

# Background jobs of a shell inherit an ignored SIGINT; the processes of these tests would then ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["support.stores.fixtures"]

# `python` must be the interpreter of these tests: the machine may have another one by that name, or none.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# For frameworks that tests start themselves. Paceline sets these variables for its own tasks.
os.environ.update(amx.environment(os.environ))

# The same examples in every run; `--hypothesis-profile default` uses a new seed each time.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# With this module TensorBoard uses its own reader. Without it, it imports TensorFlow, which crashes next to torch.
sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")


def pytest_runtest_teardown() -> None:
    assert "tensorflow" not in sys.modules or "ALONE" in os.environ, "TensorFlow is in the test process: see alone.py"
