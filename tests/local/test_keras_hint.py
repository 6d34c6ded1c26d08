"""The errors that code written for Keras 2 really raises under the installed Keras 3 lead to a hint; others do not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.agent.tasks.keras_hint import is_for_keras_2
from paceline.agent.tasks.tracebacks import Raised, places
from support.environment import without
from support.runs import PROGRAMS


@pytest.mark.long
def test_real_errors_of_code_for_keras_2() -> None:
    environment = {**without("TF_", "KERAS"), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, str(PROGRAMS / "keras_2.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    keras_2, others = json.loads(ended.stdout.splitlines()[-1])
    for errors, expected in ((keras_2, True), (others, False)):
        for name, error in errors.items():
            assert error is not None, f"{name} raises nothing"
            frames = [(file, line) for file, line in error["frames"]]
            raised = Raised(error["type"], error["text"], *places(frames))
            assert is_for_keras_2(raised) is expected, (name, str(raised))
