"""Combines waiting requests into one model call, and splits the outputs again.

No request waits for a batch to fill: while the model processes one batch, the next one accumulates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from paceline.serve.signatures import Arrays

Call = Callable[[Arrays], Arrays]


class Busy(Exception):
    """Too many examples are waiting."""


@dataclass(frozen=True)
class PendingRequest:
    call: Call  # requests with the same object may share a batch
    can_batch: bool
    inputs: Arrays
    rows: int
    outputs: asyncio.Future[Arrays]

    def key(self) -> tuple[object, ...]:
        return (self.call, *((name, each.dtype, each.shape[1:]) for name, each in sorted(self.inputs.items())))


class Batcher:
    def __init__(self, max_rows: int, max_waiting: int, on_batch: Callable[[int, int], None]) -> None:
        """`max_rows`: per batch. `max_waiting`: rows. `on_batch`: called with the requests and rows of each batch."""
        self._max_rows, self._max_waiting, self._on_batch = max_rows, max_waiting, on_batch
        self._waiting: deque[PendingRequest] = deque()
        self._model = ThreadPoolExecutor(1, "model")
        self._is_running = False
        self.rows = 0  # waiting

    async def predict(self, call: Call, can_batch: bool, inputs: Arrays, rows: int) -> Arrays:
        if self.rows + rows > self._max_waiting and self.rows:
            raise Busy(f"{self.rows} examples are waiting")
        request = PendingRequest(call, can_batch, inputs, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.rows += rows
        self._start_next()
        return await request.outputs

    def close(self) -> None:
        self._model.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        if self._is_running:
            return
        batch = self._take()
        if batch:
            self._is_running = True
            running = asyncio.get_running_loop().run_in_executor(self._model, _run, batch)
            running.add_done_callback(lambda finished: self._finish(batch, finished))

    def _take(self) -> list[PendingRequest]:
        """The longest-waiting request and those that can share its batch; canceled requests are dropped."""
        batch: list[PendingRequest] = []
        skipped: deque[PendingRequest] = deque()
        rows, key = 0, None
        while self._waiting:
            each = self._waiting.popleft()
            if each.outputs.done():
                self.rows -= each.rows
            elif not batch or (each.can_batch and each.key() == key and rows + each.rows <= self._max_rows):
                batch.append(each)
                rows += each.rows
                if not each.can_batch:
                    break
                key = key or each.key()
                if rows >= self._max_rows:
                    break
            else:
                skipped.append(each)
        self._waiting.extendleft(reversed(skipped))
        self.rows -= rows
        if batch:
            self._on_batch(len(batch), rows)
        return batch

    def _finish(self, batch: list[PendingRequest], finished: asyncio.Future[list[Arrays | Exception]]) -> None:
        self._is_running = False
        for each, result in zip(batch, finished.result(), strict=True):
            if each.outputs.done():
                continue  # canceled
            if isinstance(result, Exception):
                each.outputs.set_exception(result)
            else:
                each.outputs.set_result(result)
        self._start_next()


def _run(batch: list[PendingRequest]) -> list[Arrays | Exception]:
    if len(batch) > 1:
        try:
            return _run_together(batch)
        except Exception:
            pass  # one request may be invalid: run each separately
    return [_run_alone(each) for each in batch]


def _run_alone(each: PendingRequest) -> Arrays | Exception:
    try:
        return each.call(each.inputs)
    except Exception as error:
        return error


def _run_together(batch: list[PendingRequest]) -> list[Arrays | Exception]:
    names = batch[0].inputs
    outputs = batch[0].call({name: np.concatenate([each.inputs[name] for each in batch]) for name in names})
    total = sum(each.rows for each in batch)
    if any(each.shape[:1] != (total,) for each in outputs.values()):
        raise ValueError("the model does not return one row per example")
    results: list[Arrays | Exception] = []
    start = 0
    for each in batch:
        results.append({name: whole[start : start + each.rows] for name, whole in outputs.items()})
        start += each.rows
    return results
