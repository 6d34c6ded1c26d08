"""A copy of a state in host memory: one block that all snapshots reuse, pinned if a GPU copies to it."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from paceline.runtime.copy_buffer import block
from paceline.torch.state_trees import SnapshotUnsafe, mapped

_ALIGN = 64  # as torch.save aligns its records


class StateCopy:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = 0  # the address of the pinned memory, if any
        self._layout: list[Any] = []
        self._slots: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, tree: Any) -> Any:
        """A copy of the tree in its current state. Overwrites the result of an earlier call."""
        tensors, slot_numbers = self._allocated(tree)
        with torch.no_grad():
            self._copy(tensors)
        numbers = iter(slot_numbers)
        return mapped(tree, lambda *_: self._slots[next(numbers)])

    def prepare(self, tree: Any) -> None:
        """Allocate the memory now, so that the first snapshot does not wait for it."""
        self._allocated(tree)

    def free(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._memory, self._pinned, self._layout, self._slots = None, 0, [], []

    def _allocated(self, tree: Any) -> tuple[list[torch.Tensor], list[int]]:
        """The distinct tensors and, for each leaf of the tree, the index of its tensor: two names may share one."""
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        number_at_address: dict[int, int] = {}

        def collect(tensor: torch.Tensor, path: str) -> None:
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise SnapshotUnsafe(
                    f"{path} is a tensor with layout {tensor.layout}: only strided tensors can be copied"
                )
            number = number_at_address.setdefault(tensor.data_ptr(), len(tensors))
            if number == len(tensors) or not _same(tensor, tensors[number]):
                number = len(tensors)
                tensors.append(tensor)
            numbers.append(number)

        mapped(tree, collect)
        layout = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if layout != self._layout:
            self._lay_out(tensors)
            self._layout = layout
        return tensors, numbers

    def _lay_out(self, tensors: list[torch.Tensor]) -> None:
        shapes = [torch.empty_like(tensor, device="meta") for tensor in tensors]  # dense, otherwise contiguous
        size = sum(-(-shape.nbytes // _ALIGN) * _ALIGN for shape in shapes)
        if self._memory is None or not size <= len(self._memory) <= 1.05 * size + mmap.PAGESIZE:
            self.free()
            self._memory = block(size)
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            whole.zero_()  # makes the kernel allocate the pages now
            if any(tensor.is_cuda for tensor in tensors):
                self._pin(whole)
        self._slots, offset = [], 0
        for shape in shapes:
            self._slots.append(_slot(self._memory, offset, shape))
            offset += -(-shape.nbytes // _ALIGN) * _ALIGN

    def _pin(self, whole: torch.Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        if int(code) == 0:  # otherwise copies are slower, but work
            self._pinned = whole.data_ptr()

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        """Uses torch's own threads: other threads would compete with them, as they spin for a while after each step."""
        pairs = list(zip(self._slots, tensors))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))  # after the work that training has queued
            with torch.cuda.stream(stream):
                for slot, tensor in pairs:
                    if tensor.device == device:
                        slot.copy_(tensor, non_blocking=True)
        for slot, tensor in pairs:
            if not tensor.is_cuda:
                slot.copy_(tensor)
        for stream in self._streams.values():
            stream.synchronize()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at the same address are the same."""
    return (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())


def _slot(memory: mmap.mmap, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor with its own storage, so that torch.save writes only this tensor, and nothing twice."""
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return raw.view(like.dtype).as_strided(like.shape, like.stride())
