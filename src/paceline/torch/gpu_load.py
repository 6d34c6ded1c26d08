"""Copies tensors of a snapshot to GPUs: several threads, each through pinned memory of its own.

A plain copy from a mapped file uses one thread, which also waits for the pages of the file: a fraction of the speed.
Threads do not use the mapping, but read the file: to map its pages takes longer than to copy them.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # a target, and the source of its values

_LARGE = 1 << 20  # bytes; for smaller tensors a plain copy is as fast
_PIECE = 4 << 20
_MAX_THREADS = 8  # together they read as fast as a GPU receives


def is_fast(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether threads can copy this pair, byte by byte."""
    dense = all(map(is_plain, (target, source)))
    same = target.dtype == source.dtype and target.shape == source.shape
    return target.is_cuda and source.device.type == "cpu" and dense and same and source.nbytes >= _LARGE


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes, in order, are its values: those of a conjugate or negative view are not."""
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


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
    files = MappedFiles()
    try:
        pieces = [
            (target.view(-1).view(torch.uint8)[at : at + _PIECE], files.source(source.data_ptr() + at))
            for target, source in pairs
            for at in range(0, source.nbytes, _PIECE)
        ]
        _copy_pieces(pieces, device)
    finally:
        files.close()


def _copy_pieces(pieces: list[tuple[torch.Tensor, Source]], device: torch.device) -> None:
    queue, lock = iter(pieces), threading.Lock()

    def next_piece() -> tuple[torch.Tensor, Source] | None:
        with lock:
            return next(queue, None)

    def work(stream: torch.cuda.Stream | None) -> None:
        lane = _Lane(stream)
        with torch.cuda.stream(stream):
            for piece in iter(next_piece, None):
                lane.copy(*piece)
        lane.finish()

    threads = max(1, min(_MAX_THREADS, _cores(), len(pieces)))
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, _stream(device)) for _ in range(threads)]:
            future.result()


class Source(NamedTuple):
    """Memory to be copied, and the file that it is mapped from, if any (otherwise `fd` is -1)."""

    address: int
    fd: int
    offset: int

    def copy_to(self, buffer: torch.Tensor) -> None:
        """Other threads run in the meantime."""
        address, size = buffer.data_ptr(), buffer.nbytes
        if self.fd >= 0:
            try:
                if os.preadv(self.fd, [(ctypes.c_char * size).from_address(address)], self.offset) == size:
                    return
            except OSError:
                pass
        ctypes.memmove(address, self.address, size)


class MappedFiles:
    """The files that this process has mapped, by address. None of them is known on a system without /proc."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}  # path -> descriptor; -1: it cannot be read
        self._mappings: list[tuple[int, int, int, int, str]] = []  # start, end, offset, inode and path
        try:
            with open("/proc/self/maps") as file:
                for line in file:
                    span, _, offset, _, inode, *path = line.rstrip("\n").split(None, 5)
                    if path and int(inode):
                        start, _, end = span.partition("-")
                        self._mappings.append((int(start, 16), int(end, 16), int(offset, 16), int(inode), path[0]))
        except (OSError, ValueError):
            pass
        self._starts = [mapping[0] for mapping in self._mappings]

    def source(self, address: int) -> Source:
        """`address`: in memory that was not changed since it was mapped."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number >= 0:
            start, end, offset, inode, path = self._mappings[number]
            if address < end:
                return Source(address, self._open(path, inode), address - start + offset)
        return Source(address, -1, 0)

    def _open(self, path: str, inode: int) -> int:
        if path not in self._fds:
            self._fds[path] = -1
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return -1
            self._fds[path] = fd
            if os.fstat(fd).st_ino != inode:  # another file has that name by now
                os.close(fd)
                self._fds[path] = -1
        return self._fds[path]

    def close(self) -> None:
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)


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

    def copy(self, target: torch.Tensor, source: Source) -> None:
        self._buffers.reverse()
        self._events.reverse()
        buffer = self._buffers[0][: target.nbytes]
        for event in self._events[:1]:
            event.synchronize()  # the GPU has read what the buffer contained
        source.copy_to(buffer)
        if self._stream is None:
            target.copy_(buffer)
            return
        target.copy_(buffer, non_blocking=True)
        self._events[0].record(self._stream)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
