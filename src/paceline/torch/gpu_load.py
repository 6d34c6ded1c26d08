"""Copies tensors of a snapshot to GPUs: several threads, each through pinned memory of its own.

A plain copy from a mapped file uses one thread, which also waits for the pages of the file: a fraction of the speed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # a target, and the source of its values

_LARGE = 1 << 20  # bytes; for smaller tensors a plain copy is as fast
_PIECE = 4 << 20
_MAX_THREADS = 8  # together they read as fast as a GPU receives


def is_fast(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether threads can copy this pair, byte by byte."""
    dense = all(one.layout is torch.strided and one.is_contiguous() for one in (target, source))
    same = target.dtype == source.dtype and target.shape == source.shape
    return target.is_cuda and source.device.type == "cpu" and dense and same and source.nbytes >= _LARGE


def copy_all(pairs: Iterable[Pair]) -> None:
    """Returns when all values have arrived."""
    by_device: dict[torch.device, list[Pair]] = {}
    with torch.no_grad():
        for target, source in pairs:
            if is_fast(target, source):
                by_device.setdefault(target.device, []).append((target.detach(), source))
            else:
                target.copy_(source)
        for device, large in by_device.items():
            copy_in_threads(large, device)


def copy_in_threads(pairs: list[Pair], device: torch.device) -> None:
    pieces = [
        (target.view(-1).view(torch.uint8)[at : at + _PIECE], source.data_ptr() + at)
        for target, source in pairs
        for at in range(0, source.nbytes, _PIECE)
    ]
    queue, lock = iter(pieces), threading.Lock()

    def next_piece() -> tuple[torch.Tensor, int] | None:
        with lock:
            return next(queue, None)

    def work(stream: torch.cuda.Stream | None) -> None:
        lane = _Lane(stream)
        for piece in iter(next_piece, None):
            lane.copy(*piece)
        lane.finish()

    threads = max(1, min(_MAX_THREADS, _cores(), len(pieces)))
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, _stream(device)) for _ in range(threads)]:
            future.result()


def _cores() -> int:
    """The share of this task: the tasks of a host restore at the same time."""
    return len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":  # in tests
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # earlier work may still use the memory of the targets
    return stream


class _Lane:
    """Two buffers in turn: while the GPU reads one, a thread fills the other."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        pinned = stream is not None
        self._buffers = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if pinned else []

    def copy(self, target: torch.Tensor, source: int) -> None:
        self._buffers.reverse()
        self._events.reverse()
        buffer = self._buffers[0][: target.nbytes]
        for event in self._events[:1]:
            event.synchronize()  # the GPU has read what the buffer contained
        ctypes.memmove(buffer.data_ptr(), source, buffer.nbytes)  # other threads run meanwhile
        if self._stream is None:
            target.copy_(buffer)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(buffer, non_blocking=True)
            self._events[0].record()

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
