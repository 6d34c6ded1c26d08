"""What the GPUs of a host do, measured in a thread: by NVML, the library of the driver, or else by nvidia-smi."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from typing import Any, Callable

from paceline.agent.captain.events import GpuResources

EVERY = 10.0  # seconds
SMI_EVERY = 30.0
SMI_LIMIT = 20.0  # seconds for nvidia-smi to answer
MOST = 64
FAILURES = 5  # in a row, after which measuring ends
DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver; the second one on WSL
LIBRARY = "libnvidia-ml.so.1"
MIB = 1024 * 1024
_QUERY = ["--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]

Measure = Callable[[], "tuple[GpuResources, ...]"]


class GpuMonitor:
    """A driver that does not answer blocks only its own thread."""

    def __init__(self) -> None:
        self._last: tuple[GpuResources, ...] = ()
        self._closing = threading.Event()
        if any(map(os.path.exists, DEVICES)):
            threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def last(self) -> tuple[GpuResources, ...]:
        """What was last measured; nothing without GPUs."""
        return self._last

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        chosen = choose()
        failures = 0
        while chosen is not None and failures < FAILURES:
            measure, every = chosen
            try:
                self._last, failures = measure(), 0
            except (OSError, ValueError, subprocess.SubprocessError):
                self._last, failures = (), failures + 1
            if self._closing.wait(every):
                return


def choose() -> tuple[Measure, float] | None:
    """How to measure, and how often; None: it is not possible."""
    try:
        return Nvml().measure, EVERY
    except (OSError, AttributeError):
        program = shutil.which("nvidia-smi")
        return None if program is None else ((lambda: measure_by_smi(program)), SMI_EVERY)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name}: NVML error {status}")

    def measure(self) -> tuple[GpuResources, ...]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(self._measure(index) for index in range(min(count.value, MOST)))

    def _measure(self, index: int) -> GpuResources:
        device, memory, utilization = ctypes.c_void_p(), _Memory(), _Utilization()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        try:
            self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilization))
        except OSError:
            pass  # a part of a GPU (MIG) has none
        return GpuResources(min(1.0, utilization.gpu / 100), memory.used, memory.total)


def measure_by_smi(program: str) -> tuple[GpuResources, ...]:
    # The variable tells the agent that the process does not belong to a task.
    environment = {**os.environ, "PACELINE_TASK": "nvidia-smi"}
    result = subprocess.run(
        [program, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        timeout=SMI_LIMIT, env=environment, check=False,
    )  # fmt: skip
    return parse_smi(result.stdout.decode("utf-8", "replace"))


def parse_smi(text: str) -> tuple[GpuResources, ...]:
    """
    >>> parse_smi("85, 1024, 40960\\n[N/A], 0, 40960\\n")[0].memory
    1073741824
    """
    gpus = []
    for line in text.splitlines()[:MOST]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
            busy = min(100, int(fields[0])) if fields[0].isdigit() else 0
            gpus.append(GpuResources(busy / 100, int(fields[1]) * MIB, int(fields[2]) * MIB))
    return tuple(gpus)
