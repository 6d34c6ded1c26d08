"""Setup shared by all tests: library settings and the object store fixtures."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from paceline.frameworks import amx_probe

# Background jobs of a shell inherit an ignored SIGINT, and programs under nohup an ignored SIGHUP; the processes of
# these tests would then ignore these signals, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["support.stores.fixtures"]

# `python` must be the interpreter of these tests: the machine may have another one by that name, or none.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# For frameworks that tests start themselves, also if PACELINE_AMX overrides the result of the probe. Paceline sets this
# variable for its own tasks.
if amx_probe.detected() == amx_probe.TRAPS and not {amx_probe.VARIABLE, amx_probe.OLD_VARIABLE} & os.environ.keys():
    os.environ[amx_probe.VARIABLE] = amx_probe.LIMIT

# The same examples in every run; `--hypothesis-profile default` uses a new seed each time. How long they take depends
# on what else the machine does.
same = settings(derandomize=True, max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", same)
settings.register_profile("more", same, max_examples=250)
settings.load_profile("same")

# With this module TensorBoard uses its own reader. Without it, it imports TensorFlow, which crashes next to torch.
sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """JAX starts threads in the process that uses it, and other tests fork: its tests come last."""
    items.sort(key=lambda item: item.path.name == "test_jax_snapshots.py")


def pytest_runtest_teardown() -> None:
    assert "tensorflow" not in sys.modules or "ALONE" in os.environ, "TensorFlow is in the test process: see alone.py"
