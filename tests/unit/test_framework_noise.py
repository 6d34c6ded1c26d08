"""Which lines of frameworks `paceline run` hides, and which it does not."""

from __future__ import annotations

import pytest

from paceline.view.output.framework_noise import is_noise

FACTORY = "Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1794906827.444774   11692 port.cc:153] oneDNN custom operations are on. You may see slightly",
        "2026-11-17 09:15:33.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate",
        f"E0000 00:00:1794906827.444774   11692 cuda_dnn.cc:8579] {FACTORY}",
        f"2026-11-17 09:15:33.123456: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] {FACTORY}",
        "W0000 00:00:1794906827.444774   11692 computation_placer.cc:177] computation placer already registered.",
    ],
)
def test_start_up_messages_that_need_no_action_are_noise(line: str) -> None:
    assert is_noise(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 100 of 800, loss 0.1961",
        "I1117 09:15:33.123456 140735 train.py:42] the program's own absl.logging line",
        "I1117 09:15:33.123456 140735 kernel.cc:42] a line of the user's own C++ code",
        "I20261117 09:15:33.123456 140735 kernel.cc:42] the same, by glog",
        "2026-11-17 09:15:33.123456: I my/kernel.cc:42] and by another logger",
        "INFO:tensorflow:a line of the program",
        "W0000 00:00:1794906827.444774   11692 gpu_device.cc:2430] Cannot dlopen some GPU libraries.",
        "E0000 00:00:1794906827.444774   11692 cuda_driver.cc:265] failed call to cuInit: CUDA_ERROR_NO_DEVICE",
        "2026-11-17 09:15:33.123456: W tensorflow/core/framework/op_kernel.cc:1816] OP_REQUIRES failed",
        "Traceback (most recent call last):",
        "the WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    ],
)
def test_all_other_lines_are_shown(line: str) -> None:
    assert not is_noise(line)
