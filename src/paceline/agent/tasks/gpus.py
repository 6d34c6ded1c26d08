"""What the GPUs of a host do, measured in a thread: by NVML, the library of the driver, or else by nvidia-smi.

Both list all GPUs of the machine, or all of the container, in the order of their PCI addresses. A host has only some of
them if several hosts run on one machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Callable

from paceline.agent.captain.events import GpuResources
from paceline.agent.fast_dataclass import record

EVERY = 10.0  # seconds
SMI_EVERY = 30.0
SMI_LIMIT = 20.0  # seconds for nvidia-smi to answer
MOST = 64
FAILURES = 5  # in a row, after which measuring ends
DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver; the second one on WSL
LIBRARY = "libnvidia-ml.so.1"
MIB = 1024 * 1024
ORDER = "CUDA_DEVICE_ORDER"
_BY_ADDRESS = "PCI_BUS_ID"  # value of ORDER
_PART = "MIG-"  # begins the UUIDs of parts of GPUs
_LONGEST_TEXT = 96  # bytes of what NVML returns, such as a UUID
_QUERY = ["--query-gpu=uuid,name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]

Measure = Callable[[], "tuple[GpuResources, ...]"]


@record
class ListedGpu:
    uuid: str
    model: str


@record
class HostGpus:
    """The GPUs of a host, as CUDA finds them."""

    names: tuple[str, ...]  # as in CUDA_VISIBLE_DEVICES: indexes, UUIDs, or the beginnings of UUIDs
    order: str = ""  # CUDA_DEVICE_ORDER of its tasks

    def find(self, listed: Sequence[ListedGpu]) -> list[int]:
        """Their positions in this list. Like CUDA, it ignores all names from the first one on that it does not know.

        If the models differ, CUDA's own order begins with what it takes for the fastest: an index then says nothing
        about the position, unless the host has all GPUs. With equal models, that order is the one of the addresses.

        >>> HostGpus(("1", "GPU-5"), "PCI_BUS_ID").find([ListedGpu("GPU-51", "H200"), ListedGpu("GPU-60", "A2")])
        [1, 0]
        """
        models = {gpu.model for gpu in listed if gpu.model}
        is_order_known = self.order == _BY_ADDRESS or len(models) <= 1 or len(self.names) == len(listed)
        positions: list[int] = []
        for name in self.names[:MOST]:
            if name.isdecimal():
                matching = [int(name)] if is_order_known and int(name) < len(listed) else []
            else:
                matching = [number for number, gpu in enumerate(listed) if gpu.uuid.startswith(name)]
            if len(matching) != 1:
                break
            positions += matching
        return positions


class GpuMonitor:
    """A driver that does not answer blocks only its own thread."""

    def __init__(self, gpus: HostGpus) -> None:
        self._gpus = gpus
        self._last: tuple[GpuResources, ...] = ()
        self._closing = threading.Event()
        if gpus.names and any(map(os.path.exists, DEVICES)):
            threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def last(self) -> tuple[GpuResources, ...]:
        """What was last measured; nothing without GPUs."""
        return self._last

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        chosen = choose(self._gpus)
        failures = 0
        while chosen is not None and failures < FAILURES:
            measure, every = chosen
            try:
                self._last, failures = measure(), 0
            except (OSError, ValueError, subprocess.SubprocessError):
                self._last, failures = (), failures + 1
            if self._closing.wait(every):
                return


def choose(gpus: HostGpus) -> tuple[Measure, float] | None:
    """How to measure, and how often; None: it is not possible."""
    try:
        return Nvml(gpus).measure, EVERY
    except (OSError, AttributeError):
        program = shutil.which("nvidia-smi")
        return None if program is None else ((lambda: measure_by_smi(program, gpus)), SMI_EVERY)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    def __init__(self, gpus: HostGpus, library: Any = None) -> None:
        self._gpus = gpus
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name}: NVML error {status}")

    def measure(self) -> tuple[GpuResources, ...]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        known = [self._by_index(index) for index in range(min(count.value, MOST))]
        for name in self._gpus.names[:MOST]:
            if name.startswith(_PART):
                known += self._by_uuid(name)  # NVML lists whole GPUs only
        positions = self._gpus.find([gpu for gpu, _ in known])
        return tuple(self._measure(known[position][1]) for position in positions)

    def _by_index(self, index: int) -> tuple[ListedGpu, ctypes.c_void_p]:
        device = ctypes.c_void_p()
        try:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            return ListedGpu(self._text("nvmlDeviceGetUUID", device), self._text("nvmlDeviceGetName", device)), device
        except OSError:
            return ListedGpu("", ""), device  # it has failed, and may belong to another host

    def _by_uuid(self, name: str) -> list[tuple[ListedGpu, ctypes.c_void_p]]:
        device = ctypes.c_void_p()
        try:
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name.encode()), ctypes.byref(device))
        except OSError:
            return []
        return [(ListedGpu(name, ""), device)]

    def _text(self, function: str, device: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_LONGEST_TEXT)
        self._call(function, device, text, ctypes.c_uint(_LONGEST_TEXT))
        return text.value.decode("utf-8", "replace")

    def _measure(self, device: ctypes.c_void_p) -> GpuResources:
        memory, utilization = _Memory(), _Utilization()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        try:
            self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilization))
        except OSError:
            pass  # a part of a GPU (MIG) has none
        return GpuResources(min(1.0, utilization.gpu / 100), memory.used, memory.total)


def measure_by_smi(program: str, gpus: HostGpus) -> tuple[GpuResources, ...]:
    # The variable tells the agent that the process does not belong to a task.
    environment = {**os.environ, "PACELINE_TASK": "nvidia-smi"}
    result = subprocess.run(
        [program, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        timeout=SMI_LIMIT, env=environment, check=False,
    )  # fmt: skip
    return parse_smi(result.stdout.decode("utf-8", "replace"), gpus)


def parse_smi(text: str, gpus: HostGpus) -> tuple[GpuResources, ...]:
    """
    >>> lines = "GPU-5, H200, 85, 1024, 40960\\nGPU-6, H200, [N/A], 0, 40960\\n"
    >>> parse_smi(lines, HostGpus(("0",)))[0].memory
    1073741824
    """
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()[:MOST]]
    rows = [row for row in rows if len(row) == 5]
    measured = [rows[position][2:] for position in gpus.find([ListedGpu(row[0], row[1]) for row in rows])]
    return tuple(
        GpuResources(min(100, int(busy)) / 100 if busy.isdigit() else 0.0, int(used) * MIB, int(total) * MIB)
        for busy, used, total in measured
        if used.isdigit() and total.isdigit()
    )
