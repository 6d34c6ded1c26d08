"""A copy of a state in host memory: one block that every snapshot uses again, pinned where a GPU copies to it."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from paceline.runtime.memory import block
from paceline.torch.tree import SnapshotUnsafe, mapped

_ALIGN = 64  # as torch.save aligns its records


class Host:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = 0  # its address, where it is
        self._layout: list[Any] = []
        self._slots: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def hold(self, tree: Any) -> Any:
        """The tree as it is now, in memory of our own. What an earlier call gave is overwritten."""
        tensors, numbers = self._prepared(tree)
        with torch.no_grad():
            self._copy(tensors)
        left = iter(numbers)
        return mapped(tree, lambda *_: self._slots[next(left)])

    def prepare(self, tree: Any) -> None:
        """Take the memory now, so that the first snapshot does not wait for it."""
        self._prepared(tree)

    def free(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._memory, self._pinned, self._layout, self._slots = None, 0, [], []

    def _prepared(self, tree: Any) -> tuple[list[torch.Tensor], list[int]]:
        """The tensors; and, for each place in the tree, the number of its own: weights that two names share are one."""
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        seen: dict[int, int] = {}

        def look(tensor: torch.Tensor, path: str) -> None:
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise SnapshotUnsafe(f"{path} is a tensor of layout {tensor.layout}: only strided ones can be copied")
            number = seen.setdefault(tensor.data_ptr(), len(tensors))
            if number == len(tensors) or not _same(tensor, tensors[number]):
                number = len(tensors)
                tensors.append(tensor)
            numbers.append(number)

        mapped(tree, look)
        layout = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if layout != self._layout:
            self._lay_out(tensors)
            self._layout = layout
        return tensors, numbers

    def _lay_out(self, tensors: list[torch.Tensor]) -> None:
        shapes = [torch.empty_like(tensor, device="meta") for tensor in tensors]  # dense, else contiguous
        size = sum(-(-shape.nbytes // _ALIGN) * _ALIGN for shape in shapes)
        if self._memory is None or not size <= len(self._memory) <= 1.05 * size + mmap.PAGESIZE:
            self.free()
            self._memory = block(size)
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            whole.zero_()  # the pages are there from now on
            if any(tensor.is_cuda for tensor in tensors):
                self._pin(whole)
        self._slots, offset = [], 0
        for shape in shapes:
            self._slots.append(_slot(self._memory, offset, shape))
            offset += -(-shape.nbytes // _ALIGN) * _ALIGN

    def _pin(self, whole: torch.Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        if int(code) == 0:  # else it is slower, and that is all
            self._pinned = whole.data_ptr()

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        """By torch's own threads: others would wait for these, which look for work for a while after each step."""
        pairs = list(zip(self._slots, tensors))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))  # what training has asked for comes first
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
    """Of two that begin at the same address."""
    return (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())


def _slot(memory: mmap.mmap, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage of its own, so that its file holds it alone and nothing is in it twice."""
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return raw.view(like.dtype).as_strided(like.shape, like.stride())
