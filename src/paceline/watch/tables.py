"""Lines, tables and their places on the screen: text with names of styles, which every terminal can show. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import combining, east_asian_width

from paceline.view.text.terminal import clean

# Names of styles; without colors, these are bold, dim and reverse.
GOOD, BAD, WARN, DIM, BOLD, NAME = "good", "bad", "warn", "dim", "bold", "name"


@dataclass(frozen=True)
class Span:
    text: str
    style: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Column:
    title: str
    is_number: bool = False  # aligned to the right
    shrinks_to: int | None = None  # it gets what the others leave, but at least this width
    rank: int = 0  # if the width does not suffice, columns with a higher rank are left out first


@dataclass(frozen=True)
class Row:
    key: str  # what the cursor stays on, if rows move
    cells: tuple[Span, ...]


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Layout:
    """The columns of a table that fit, and their widths."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]


GAP = 2  # blanks between columns
LONGEST = 4096  # characters of a text: others than these would take memory, and time whenever they are drawn


def plain(text: str) -> str:
    """One line without control characters and colors."""
    text = shortened(text)
    if text.isascii() and text.isprintable():
        return text
    return (
        clean(text.replace("\t", "    "), colors=False).replace("\n", "\\n").replace("\u200d", "").replace("\u200c", "")
    )


def shortened(text: str) -> str:
    """
    >>> len(shortened("x" * 10_000)), shortened("x" * 10_000)[-3:], shortened("xyz")
    (4096, 'x..', 'xyz')
    """
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]}.."


def width_of(text: str) -> int:
    """How many columns of a terminal the text needs."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def cut(text: str, width: int) -> str:
    """
    >>> cut("worker-host-0", 8), cut("worker", 8), cut("日本語", 5)
    ('worker..', 'worker', '日..')
    """
    if width_of(text) <= width:
        return text
    room = max(0, width - 2)
    shown = ""
    for letter in text:
        room -= width_of(letter)
        if room < 0:
            break
        shown += letter
    return shown + ".." if width > 2 else ".."[:width]


def padded(text: str, width: int, right: bool = False) -> str:
    shown = cut(text, width)
    blanks = " " * (width - width_of(shown))
    return blanks + shown if right else shown + blanks


def arrange(table: Table, width: int) -> Layout:
    """Which columns fit. A column that shrinks gets the rest of the width."""
    chosen = list(range(len(table.columns)))
    natural = [
        max([width_of(column.title), *(width_of(row.cells[index].text) for row in table.rows)])
        for index, column in enumerate(table.columns)
    ]

    def least(index: int) -> int:
        narrowest = table.columns[index].shrinks_to
        return natural[index] if narrowest is None else min(natural[index], narrowest)

    while len(chosen) > 1 and sum(map(least, chosen)) + GAP * (len(chosen) - 1) > width:
        chosen.remove(max(chosen, key=lambda index: (table.columns[index].rank, index)))
    room = width - GAP * (len(chosen) - 1) - sum(map(least, chosen))
    widths = []
    for index in chosen:
        more = min(room, natural[index] - least(index))
        room -= max(0, more)
        widths.append(min(width, least(index) + max(0, more)))
    return Layout(tuple(chosen), tuple(widths))


def heading(table: Table, layout: Layout) -> str:
    cells = [
        padded(table.columns[index].title, width, table.columns[index].is_number)
        for index, width in zip(layout.columns, layout.widths, strict=True)
    ]
    return (" " * GAP).join(cells).rstrip()


def line_of(table: Table, row: Row, layout: Layout) -> Line:
    spans: list[Span] = []
    for index, width in zip(layout.columns, layout.widths, strict=True):
        if spans:
            spans.append(Span(" " * GAP))
        cell = row.cells[index]
        spans.append(Span(padded(cell.text, width, table.columns[index].is_number), cell.style))
    return tuple(spans)


@dataclass(frozen=True)
class Heights:
    """Lines of each panel, with its heading; 0: hidden."""

    tasks: int
    generations: int
    snapshots: int
    output: int


def heights(available: int, tasks: int, generations: int, snapshots: int) -> Heights:
    """How the lines of the screen are shared. Arguments: the number of rows that each panel could show."""
    wanted = {"tasks": tasks, "generations": generations, "snapshots": snapshots, "output": 10**6}
    least = {"output": 4, "tasks": 2 + min(1, tasks), "generations": 2, "snapshots": 2}
    lines = dict.fromkeys(wanted, 0)
    for name in ("tasks", "output", "generations", "snapshots"):  # the most important ones first
        if available >= least[name] or name == "tasks":
            lines[name] = min(available, least[name])
            available -= lines[name]
    most = {"tasks": 1 + tasks, "generations": 1 + min(generations, 8), "snapshots": 1 + min(snapshots, 8)}
    turns = ("tasks", "output", "tasks", "generations", "tasks", "output", "snapshots")
    while available > 0:
        before = available
        for name in turns:
            has_room = lines[name] > 0 and (name == "output" or lines[name] < most[name])
            if available > 0 and has_room:
                lines[name] += 1
                available -= 1
        if available == before:
            lines["tasks"] += available  # all panels but this one are hidden
            available = 0
    return Heights(**lines)


def page(first: int, shown: int, total: int) -> str:
    """Which rows are visible: `3-7 of 1000`; empty if all are."""
    return f"{first + 1}-{min(total, first + shown)} of {total}" if total > shown else ""


def fitting(parts: Sequence[Span], width: int) -> Line:
    """Parts separated by blanks; those that do not fit are left out."""
    spans: list[Span] = []
    room = width
    for part in parts:
        needed = width_of(part.text) + (GAP if spans else 0)
        if not part.text or needed > room:
            continue
        spans += [Span(" " * GAP)] if spans else []
        spans.append(part)
        room -= needed
    return tuple(spans)
