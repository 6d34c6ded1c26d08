"""A stand-in for NVML, the library of NVIDIA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

GIB = 2**30
NOT_SUPPORTED, NOT_FOUND, LOST = 3, 6, 15  # NVML's errors
PART = 100  # the handle of the first part of a GPU


class FakeNvml:
    """GPUs with 16 GiB each, of which the first one uses 1 GiB, the second one 2 GiB, and so on. Only the first one
    knows its utilization."""

    def __init__(
        self, uuids: Sequence[str] = ("GPU-50a", "GPU-60b"), models: Sequence[str] = ("H200", "H200"),
        parts: Sequence[str] = (), lost: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`parts`: UUIDs of parts of GPUs. `lost`: positions of GPUs that have failed."""
        self._uuids, self._models, self._parts, self._lost = uuids, models, parts, lost

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._uuids)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = index.value + 1
        return LOST if index.value in self._lost else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, device: Any) -> int:
        name = (uuid.value or b"").decode()
        if name not in self._parts:
            return NOT_FOUND
        device._obj.value = PART + self._parts.index(name)
        return 0

    def nvmlDeviceGetUUID(self, device: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        text.value = self._uuids[(device.value or 0) - 1].encode()
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        text.value = self._models[(device.value or 0) - 1].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        number = device.value or 0
        if number - 1 in self._lost:
            return LOST
        memory._obj.total, memory._obj.used = (16 * GIB, GIB * number) if number < PART else (2 * GIB, GIB)
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: Any) -> int:
        rates._obj.gpu = 85 if device.value == 1 else 0
        return 0 if device.value == 1 else NOT_SUPPORTED
