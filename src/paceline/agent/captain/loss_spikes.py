"""Losses that jump far above their usual value: reported once, without consequences. No I/O.

The captain sees at most one value per heartbeat of a task, so a jump of a few short steps may be missed. A heartbeat
repeats metrics that were not reported again, such as the loss of the last epoch, and does not tell which ones: a value
that equals the one before is skipped. Only one task is observed: the tasks of a group usually report the same loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

WINDOW = 50  # values from which the usual one is derived
FEWEST = 20  # values that are needed
DEVIATIONS = 10  # medians of the absolute deviations from the median
QUIET_S = 60.0  # seconds between two events about the same metric
MOST = 16  # metrics


@dataclass(frozen=True)
class Level:
    """What is usual."""

    median: float
    limit: float  # a value above it is a spike
    end: float  # a spike has ended when a value is not above this


class SpikeDetector:
    """Of one metric.

    >>> detector = SpikeDetector()
    >>> [value for value in [1.0, 1.1, 0.9] * 10 + [1.5, 7.0, 8.0, 1.0, 9.0] if detector.add(value)]
    [7.0, 9.0]
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._spike: list[float] = []  # the values of a spike that has not ended
        self.level: Level | None = None  # that of the last spike

    def add(self, value: float) -> bool:
        """Returns whether a spike begins with this value."""
        if self._spike:
            self._continue(value)
            return False
        if len(self._values) >= FEWEST and value > max(self._values):
            self.level = level_of(self._values)
            if value > self.level.limit:
                self._spike = [value]
                return True
        self._values.append(value)
        return False

    def _continue(self, value: float) -> None:
        if self.level is None or value <= self.level.end:
            self._spike = []
            self._values.append(value)
            return
        self._spike.append(value)
        if len(self._spike) >= WINDOW:  # it does not return: this is what is usual from now on
            self._values.extend(self._spike)
            self._spike = []


def level_of(values: Sequence[float]) -> Level:
    """A spike exceeds the median by 10 median deviations, by as much as the median is (twice its value, if it is
    positive), and by twice as much as any of these values: losses of small batches are noisy, and some are large."""
    median = _median(values)
    deviation = _median([abs(value - median) for value in values])
    # A loss that has always been 0 has no scale.
    excess = max(DEVIATIONS * deviation, abs(median), 2 * (max(values) - median)) or math.inf
    return Level(median, median + excess, median + excess / 2)


def _median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Spikes:
    def __init__(self, leading_task: str, emit: Callable[..., None]) -> None:
        self._leading_task, self._emit = leading_task, emit
        self._task = ""  # the one that is observed: the leading task or, if it reports no loss, the first that does
        self._detectors: dict[str, SpikeDetector] = {}  # by metric
        self._newest: dict[str, float] = {}  # by metric
        self._quiet_until: dict[str, float] = {}

    def on_group_started(self) -> None:
        """From scratch or from an older snapshot, other values are usual."""
        self._observe("")

    def on_step(self, task: str, step: int, metrics: Mapping[str, float], now: float) -> None:
        losses = {name: value for name, value in metrics.items() if is_loss(name)}
        if not losses or (self._task and task not in (self._task, self._leading_task)):
            return
        if task != self._task:
            self._observe(task)
        for name, value in losses.items():
            if name not in self._detectors and len(self._detectors) >= MOST:
                continue
            detector = self._detectors.setdefault(name, SpikeDetector())
            if self._newest.get(name) == value:
                continue  # otherwise, copies of one value would become what is usual
            self._newest[name] = value
            if detector.add(value) and detector.level is not None and now >= self._quiet_until.get(name, now):
                self._quiet_until = {each: until for each, until in self._quiet_until.items() if until > now}
                self._quiet_until[name] = now + QUIET_S
                self._emit("spike", task=task, metric=name, value=value, usual=detector.level.median, step=step)

    def _observe(self, task: str) -> None:
        self._task, self._detectors, self._newest = task, {}, {}


def is_loss(name: str) -> bool:
    """
    >>> [is_loss(name) for name in ("loss", "train/Loss", "val_loss", "accuracy")]
    [True, True, True, False]
    """
    return "loss" in name.lower()
