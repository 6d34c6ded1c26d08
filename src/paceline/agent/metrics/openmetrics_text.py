"""Metrics as text: the format of OpenMetrics, and the older one of Prometheus, which files of a node exporter use."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

COUNTER, GAUGE, INFO = "counter", "gauge", "info"
MOST_SERIES = 10_000  # of a run; what exceeds it is left out and counted. They take about 30 ms
MOST_IN_FAMILY = 1_000  # of a run, by default
LONGEST_LABEL = 128  # characters of a value
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Family:
    """Metrics that differ only in the values of their labels, besides `run`."""

    name: str  # without the suffix of its kind: _total of a counter, _info of an info
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    most: int = MOST_IN_FAMILY

    @property
    def sample(self) -> str:
        """The name in a sample, and in queries."""
        return self.name + {COUNTER: "_total", INFO: "_info"}.get(self.kind, "")


LEFT_OUT = Family("paceline_series_left_out", GAUGE, "Series left out because there are too many of them.")


class Samples:
    """The values of one run, which are bounded: at most MOST_SERIES, and of each family `most`."""

    def __init__(self, run: str) -> None:
        self._run = escaped(run)
        self.lines: dict[Family, list[str]] = {}
        self._series: set[str] = set()
        self._left_out = 0

    def add(self, family: Family, value: float | None, *labels: str) -> None:
        """`labels`: the values of its labels, in order. None: there is no value, and nothing is added."""
        if value is None:
            return
        assert len(labels) == len(family.labels), f"{family.name} has the labels {family.labels}"
        lines = self.lines.setdefault(family, [])
        if len(self._series) >= MOST_SERIES or len(lines) >= family.most:
            self._left_out += 1
            return
        pairs = "".join([f',{name}="{escaped(label)}"' for name, label in zip(family.labels, labels)])
        series = f'{family.sample}{{run="{self._run}"{pairs}}}'
        if series in self._series:  # the labels were equal once they were shortened
            self._left_out += 1
            return
        self._series.add(series)
        lines.append(f"{series} {number(value)}")

    def first(self, items: Collection[Item], most: int = MOST_IN_FAMILY) -> Iterable[Item]:
        """The first of these items; the others are counted as left out."""
        self._left_out += max(0, len(items) - most)
        return islice(items, most)

    def end(self) -> Samples:
        """After the last `add`."""
        self.lines[LEFT_OUT] = [f'{LEFT_OUT.sample}{{run="{self._run}"}} {self._left_out}']
        return self


def render(runs: Iterable[Samples], families: Iterable[Family], openmetrics: bool) -> bytes:
    """The samples of several runs. `families`: all, in the order in which they are written."""
    every = list(runs)
    lines: list[str] = []
    for family in families:
        samples = [line for run in every for line in run.lines.get(family, ())]
        if samples:
            # In the older format, a counter has its suffix here, too, and there is no type `info`.
            name = family.name if openmetrics else family.sample
            kind = GAUGE if family.kind == INFO and not openmetrics else family.kind
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {kind}", *samples]
    if openmetrics:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def escaped(value: str) -> str:
    r"""As the value of a label: shortened, and without control characters.

    >>> print(escaped('a"b\\c\n\0'))
    a\"b\\c\n?
    """
    value = value[:LONGEST_LABEL]
    if not value.isprintable():
        value = "".join(c if c.isprintable() or c == "\n" else "?" for c in value)
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """
    >>> number(3), number(0.5), number(float("-inf")), number(10**400)
    ('3', '0.5', '-Inf', '+Inf')
    """
    if isinstance(value, int) and abs(value) < 1 << 63:
        return str(int(value))
    try:
        value = float(value)
    except OverflowError:
        value = math.inf if value > 0 else -math.inf
    if math.isfinite(value):
        return repr(round(value, 6) if abs(value) > 1 else value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
