"""Puts the rows of requests that wait together into one call of the model, and takes the answers apart again.

Nobody waits for a batch to fill: while the model works on one batch, the next gathers.
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
    """More is waiting than may wait."""


@dataclass(frozen=True)
class Waiting:
    call: Call  # the same object for all that may go together
    joins: bool
    inputs: Arrays
    rows: int
    answer: asyncio.Future[Arrays]

    def key(self) -> tuple[object, ...]:
        return (self.call, *((name, each.dtype, each.shape[1:]) for name, each in sorted(self.inputs.items())))


class Batcher:
    def __init__(self, most_rows: int, most_waiting: int, noted: Callable[[int, int], None]) -> None:
        """`most_rows`: of a batch; `most_waiting`: rows that may wait. `noted`: requests and rows of each batch."""
        self._most_rows, self._most_waiting, self._noted = most_rows, most_waiting, noted
        self._waiting: deque[Waiting] = deque()
        self._model = ThreadPoolExecutor(1, "model")
        self._works = False
        self.rows = 0  # that wait

    async def ask(self, call: Call, joins: bool, inputs: Arrays, rows: int) -> Arrays:
        if self.rows + rows > self._most_waiting and self.rows:
            raise Busy(f"{self.rows} examples are waiting")
        asked = Waiting(call, joins, inputs, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self.rows += rows
        self._next()
        return await asked.answer

    def close(self) -> None:
        self._model.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        if self._works:
            return
        batch = self._take()
        if batch:
            self._works = True
            done = asyncio.get_running_loop().run_in_executor(self._model, _run, batch)
            done.add_done_callback(lambda ended: self._done(batch, ended))

    def _take(self) -> list[Waiting]:
        """The one that has waited longest, and what can go with it; those that gave up are left out."""
        batch: list[Waiting] = []
        passed: deque[Waiting] = deque()
        rows, key = 0, None
        while self._waiting:
            each = self._waiting.popleft()
            if each.answer.done():
                self.rows -= each.rows
            elif not batch or (each.joins and each.key() == key and rows + each.rows <= self._most_rows):
                batch.append(each)
                rows += each.rows
                if not each.joins:
                    break
                key = key or each.key()
                if rows >= self._most_rows:
                    break
            else:
                passed.append(each)
        self._waiting.extendleft(reversed(passed))
        self.rows -= rows
        if batch:
            self._noted(len(batch), rows)
        return batch

    def _done(self, batch: list[Waiting], ended: asyncio.Future[list[Arrays | Exception]]) -> None:
        self._works = False
        for each, answer in zip(batch, ended.result(), strict=True):
            if each.answer.done():
                continue  # it has given up
            if isinstance(answer, Exception):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)
        self._next()


def _run(batch: list[Waiting]) -> list[Arrays | Exception]:
    if len(batch) > 1:
        try:
            return _together(batch)
        except Exception:
            pass  # one of them may be at fault: alone, each answers for itself
    return [_alone(each) for each in batch]


def _alone(each: Waiting) -> Arrays | Exception:
    try:
        return each.call(each.inputs)
    except Exception as error:
        return error


def _together(batch: list[Waiting]) -> list[Arrays | Exception]:
    names = batch[0].inputs
    outputs = batch[0].call({name: np.concatenate([each.inputs[name] for each in batch]) for name in names})
    total = sum(each.rows for each in batch)
    if any(each.shape[:1] != (total,) for each in outputs.values()):
        raise ValueError("the model does not give a row for each example")
    answers: list[Arrays | Exception] = []
    begin = 0
    for each in batch:
        answers.append({name: whole[begin : begin + each.rows] for name, whole in outputs.items()})
        begin += each.rows
    return answers
