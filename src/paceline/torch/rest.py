"""The rest of a copy, made while training goes on: tensors that nobody but an optimizer changes.

A step of training changes them at its very end, so there is time until then, when `finish` is called. Whether somebody
else has changed one before is told by torch's count of changes and, as writing to `.data` is not counted, by a few
values of each.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import Any

import torch

from paceline.runtime.memory import Copying
from paceline.torch.files import is_dtensor

LEAST = 1 << 20  # bytes: smaller ones are copied before anybody could look after them
_PIECE = 4 << 20
_VALUES = 16  # of each tensor, evenly spread, and the last

Pair = tuple[torch.Tensor, torch.Tensor]


class Changed(RuntimeError):
    """The copy is not of one moment."""


class Rest:
    def __init__(self, pairs: list[Pair], streams: dict[torch.device, torch.cuda.Stream]) -> None:
        """`pairs`: (to, from), dense and laid out alike. A GPU begins with them, by its stream; what is in host memory
        waits for the threads that come to `finish`."""
        self._counts = [(tensor, tensor._version) for _, tensor in pairs]
        self._counted = threading.Lock()
        self._changed: bool | None = None  # not known before all is copied
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        here = [pair for pair in pairs if not pair[1].is_cuda]
        self._samples = [(here, _sample(tensor for _, tensor in here))]
        for device, stream in streams.items():
            there = [pair for pair in pairs if pair[1].device == device]
            with torch.cuda.stream(stream):
                self._samples.append((there, _sample(tensor for _, tensor in there)))
                for slot, tensor in there:
                    slot.copy_(tensor, non_blocking=True)
                self._copied[device] = stream.record_event()
        self._copying = Copying(piece for pair in here for piece in _pieces(pair))

    def finish(self) -> None:
        """Before values change: what is asked of a GPU after this comes after the copy, too.

        By torch's own threads: others would wait for these, which look for work for a while after a step has used
        them.
        """
        with torch.no_grad():
            self._copying.finish(lambda piece: piece[0].copy_(piece[1]))
        for device, copied in self._copied.items():
            torch.cuda.current_stream(device).wait_event(copied)
        self._count()

    def verify(self) -> None:
        """All is in host memory now. Changed, where a tensor was changed before that."""
        self._copying.finish(_move)
        for copied in self._copied.values():
            copied.synchronize()
        self._count()
        same = all(_equal(sample, _sample(slot for slot, _ in pairs)) for pairs, sample in self._samples)
        self._samples, self._counts = [], []
        if self._changed or not same:
            raise Changed(
                "values were changed outside of an optimizer's step() while they were copied; from now on training"
                " waits for the whole copy"
            )

    def _count(self) -> None:
        """Once, as soon as all is copied: what changes later does no harm."""
        with self._counted:
            if self._changed is None:
                self._changed = any(tensor._version != count for tensor, count in self._counts)


def optimized(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Where the memory begins that nobody but these changes."""
    found = set()
    for optimizer in optimizers:
        if any(group.get("capturable") for group in optimizer.param_groups):
            continue  # its step may be part of a CUDA graph, which tells nobody when it runs
        values = [value for group in optimizer.param_groups for value in group["params"]]
        values += [value for state in optimizer.state.values() for value in state.values()]
        for value in values:
            local: Any = value.to_local() if is_dtensor(value) else value
            if type(local) in (torch.Tensor, torch.nn.Parameter) and not local.is_inference():
                found.add(local.untyped_storage().data_ptr())
    return found


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """Of a dense tensor, all values in a row, as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _pieces(pair: Pair) -> Iterable[Pair]:
    """Not too small, as to make them takes time as well."""
    if pair[1].nbytes <= _PIECE:
        return [pair]
    slot, tensor = (torch.split(_line(each).view(torch.uint8), _PIECE) for each in pair)
    return zip(slot, tensor)


def _move(piece: Pair) -> None:
    ctypes.memmove(piece[0].data_ptr(), piece[1].data_ptr(), piece[0].nbytes)  # one thread, without Python's lock


def _sample(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Some values of each, by kind: taken one by one they would need longer than the copy."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        line = _line(tensor)
        kinds.setdefault(tensor.dtype, []).extend([line[:: max(1, len(line) // _VALUES)], line[-1:]])
    return [torch.cat(some) for some in kinds.values()]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Bit for bit: NaN is no other value than NaN."""
    return all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(some, others))
