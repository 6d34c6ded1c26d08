"""Numbers over time as lines of text: curves, and generations on the same time axis. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.watch.tables import BAD, DIM, WARN, Line, Span

MOST_POINTS = 8192  # of a curve: far more than a terminal has columns
_RECENT = MOST_POINTS // 2  # the newest points, which are kept as they are: an hour of reports every second
_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"

Point = tuple[float, float]  # seconds since 1970, value


class Curve:
    """The points of a series, in time order. If they are too many, older ones are replaced by means of intervals."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, at: float, value: float) -> None:
        insort(self.points, (at, value))
        if len(self.points) > MOST_POINTS:
            self._thin_out()

    def add_earlier(self, points: Iterable[Point]) -> None:
        """Points of the past, of which some may be known already."""
        self.points = sorted({*self.points, *points})
        if len(self.points) > MOST_POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        older, recent = self.points[:-_RECENT], self.points[-_RECENT:]
        begin, interval = older[0][0], (older[-1][0] - older[0][0]) / (MOST_POINTS // 4) or 1.0
        groups: dict[int, list[Point]] = {}
        for point in older:
            groups.setdefault(int((point[0] - begin) / interval), []).append(point)
        means = [(_mean([at for at, _ in group]), _mean([value for _, value in group])) for group in groups.values()]
        self.points = [*means, *recent]


def _mean(values: list[float]) -> float:
    return values[0] if len(values) == 1 else sum(value / len(values) for value in values)


def buckets(points: Sequence[Point], begin: float, end: float, columns: int) -> list[float | None]:
    """The mean in each of `columns` equal intervals; None: no value."""
    if columns <= 0 or end <= begin:
        return [None] * max(0, columns)
    sums, counts = [0.0] * columns, [0] * columns
    for at, value in points:
        if begin <= at <= end:
            column = min(columns - 1, int((at - begin) / (end - begin) * columns))
            sums[column] += value
            counts[column] += 1
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return _with_short_gaps_closed(means, len(points))


def _with_short_gaps_closed(means: list[float | None], points: int) -> list[float | None]:
    """If there are fewer points than columns, a column without one repeats the value before it."""
    longest = max(1, 2 * len(means) // points) if 1 < points < len(means) else 1
    filled: list[float | None] = []
    last, gap = None, 0
    known = [column for column, mean in enumerate(means) if mean is not None]
    for column, mean in enumerate(means):
        last, gap = (mean, 0) if mean is not None else (last, gap + 1)
        is_inside = bool(known) and column < known[-1]
        filled.append(last if mean is None and gap <= longest and is_inside else mean)
    return filled


def chart(values: Sequence[float | None], rows: int, ascii_only: bool = False) -> list[str]:
    """Lines of text, the top one first. The smallest value has the lowest visible bar.

    >>> chart([0.0, None, 1.0, 2.0], 1), chart([5.0, 5.0], 1)
    (['▁ ▅█'], ['▄▄'])
    """
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    known = [value for value in values if value is not None]
    if not known:
        return [" " * len(values)] * rows
    least, largest = min(known), max(known)
    steps = 8 * rows
    levels = []
    for value in values:
        if value is None:
            levels.append(0)
        elif largest == least:
            levels.append(steps // 2)
        else:
            levels.append(1 + round((value - least) / (largest - least) * (steps - 1)))
    lines = []
    for row in reversed(range(rows)):
        lines.append("".join(blocks[max(0, min(8, level - 8 * row))] for level in levels))
    return lines


@dataclass(frozen=True)
class Period:
    """When a generation ran. `end`: None if it still runs."""

    number: int
    begin: float
    end: float | None
    has_failed: bool


def timeline(
    periods: Sequence[Period], begin: float, end: float, columns: int, ascii_only: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Line:  # fmt: skip
    """1━━━━━x2━━━x3━━━: the number of each generation where it starts, x where it fails, gaps where none runs. `marks`:
    when, and a letter; the others take precedence."""
    if columns <= 0 or end <= begin:
        return ()
    fill, failed = "=" if ascii_only else "━", "x"
    cells: list[tuple[str, str]] = [(" ", "")] * columns

    def column(at: float) -> int:
        return int((at - begin) / (end - begin) * columns)

    for period in periods:
        last = column(end if period.end is None else period.end)
        first = column(period.begin)
        if last < 0 or first >= columns:
            continue
        for index in range(max(0, first), min(columns, last + 1)):
            cells[index] = cells[index] if cells[index] == (failed, BAD) else (fill, DIM)
        start = max(0, first)
        start += cells[start] == (failed, BAD)  # the failure of the generation before stays visible
        for index, digit in enumerate(str(period.number), start):
            if index < min(columns, last + 1):
                cells[index] = (digit, "")
        if period.has_failed and 0 <= last < columns:
            cells[last] = (failed, BAD)
    for at, letter in marks:
        if begin <= at < end and cells[column(at)][0] in (fill, " "):
            cells[column(at)] = (letter, WARN)
    return joined(cells)


def joined(cells: Iterable[tuple[str, str]]) -> Line:
    """Neighbors with the same style as one span."""
    spans: list[Span] = []
    for text, style in cells:
        if spans and spans[-1].style == style:
            spans[-1] = Span(spans[-1].text + text, style)
        else:
            spans.append(Span(text, style))
    return tuple(spans)
