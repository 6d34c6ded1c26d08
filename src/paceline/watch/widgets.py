"""Widgets of the terminal view. They draw segments of plain text: whatever programs and other users have written is
neither markup nor a control sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from paceline.watch import tables
from paceline.watch.tables import Line, Span, Table, cut, padded, page, plain, width_of

STYLES = {
    "": Style(),
    tables.GOOD: Style(color="green"),
    tables.BAD: Style(color="red", bold=True),
    tables.WARN: Style(color="yellow"),
    tables.DIM: Style(dim=True),
    tables.BOLD: Style(bold=True),
    tables.NAME: Style(color="cyan"),
}
_REVERSED, _HEADING = Style(reverse=True), Style(bold=True, underline=True)


def strip(line: Line, width: int, style: Style | None = None) -> Strip:
    """A line, cut or filled to this width. `style`: of the whole line, such as that of the cursor."""
    segments = [Segment(plain(span.text), style or STYLES[span.style]) for span in line]
    return Strip(segments).adjust_cell_length(width, style or STYLES[""])


class Lines(Widget):
    """Some lines of text."""

    DEFAULT_CSS = "Lines { height: auto; width: 100%; }"

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._lines: list[Line] = []

    def show(self, lines: Sequence[Line]) -> None:
        if list(lines) != self._lines:
            self.styles.height = max(1, len(lines))
            self._lines = list(lines)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        return strip(self._lines[y] if y < len(self._lines) else (), self.size.width)


class Panel(Widget, can_focus=True):
    """A heading, and rows of which some are visible: a table with a cursor, or lines of text that scroll."""

    DEFAULT_CSS = "Panel { height: 1fr; width: 100%; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+b", "page(-1)", show=False),
        Binding("pagedown,ctrl+f,space", "page(1)", show=False),
        Binding("home,g", "edge(-1)", show=False),
        Binding("end,G", "edge(1)", show=False),
        Binding("left", "shift(-20)", show=False),
        Binding("right", "shift(20)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """The user has pressed Enter on a row."""

        def __init__(self, panel: Panel, key: str) -> None:
            super().__init__()
            self.panel, self.key = panel, key

    def __init__(self, id: str, title: str = "", has_cursor: bool = False, follows: bool = False) -> None:
        """`follows`: the last line stays visible when lines are added, until the user scrolls up."""
        super().__init__(id=id)
        self._title, self._note, self._empty = title, "", ""
        self._has_cursor, self._follows, self._is_at_end = has_cursor, follows, follows
        self._table: Table | None = None
        self._layout: tuple[int, tables.Layout] | None = None  # for a width
        self._count = 0
        self._line_at: Callable[[int], Line] = _no_line
        self._first = self._cursor = self._shift = 0
        self._dropped = 0  # lines that were deleted before those that are shown

    # ---- contents

    def show_table(self, table: Table, note: str = "", empty: str = "none") -> None:
        """`empty`: what to show instead of rows."""
        if (table, note, empty) == (self._table, self._note, self._empty):
            return
        key = self.key
        self._table, self._layout, self._note, self._empty = table, None, note, empty
        self._count = len(table.rows)
        if key is not None and (self._cursor >= self._count or table.rows[self._cursor].key != key):
            keys = [row.key for row in table.rows]
            self._cursor = keys.index(key) if key in keys else self._cursor
        self._clamp()
        self.refresh()

    def show_lines(
        self, count: int, line_at: Callable[[int], Line], note: str = "", empty: str = "", dropped: int = 0
    ) -> None:
        """`line_at`: the line with this number. `dropped`: how many lines were deleted before the first one, since the
        beginning; the visible lines stay where they are."""
        if not self._is_at_end:
            self._first = max(0, self._first - max(0, dropped - self._dropped))
        self._count, self._line_at, self._note, self._empty, self._dropped = count, line_at, note, empty, dropped
        self._clamp()
        self.refresh()

    @property
    def key(self) -> str | None:
        """Of the row under the cursor."""
        if self._table is None or not self._cursor < self._count:
            return None
        return self._table.rows[self._cursor].key

    # ---- scrolling

    @property
    def _visible(self) -> int:
        return max(1, self.size.height - 1)

    def _clamp(self) -> None:
        last = max(0, self._count - self._visible)
        self._cursor = max(0, min(self._cursor, self._count - 1))
        if self._has_cursor:
            self._first = max(self._cursor - self._visible + 1, min(self._first, self._cursor))
        elif self._is_at_end:
            self._first = last
        self._first = max(0, min(self._first, last))

    def on_resize(self) -> None:
        self._clamp()
        self.refresh()

    def action_move(self, rows: int) -> None:
        if self._has_cursor:
            self._cursor += rows
        else:
            self._scroll(rows)
        self._clamp()
        self.refresh()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self._visible - 1))

    def action_edge(self, side: int) -> None:
        self.action_move(side * (self._count + 1))

    def action_shift(self, columns: int) -> None:
        """Lines that are longer than the screen."""
        self._shift = max(0, self._shift + columns) if self._table is None else 0
        self.refresh()

    def action_choose(self) -> None:
        if self.key is not None:
            self.post_message(self.Chosen(self, self.key))

    def _scroll(self, rows: int) -> None:
        last = max(0, self._count - self._visible)
        self._first = max(0, min(self._first + rows, last))
        self._is_at_end = self._follows and self._first == last

    # ---- drawing

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            return self._heading(width)
        index = self._first + y - 1
        if index >= self._count:
            return strip((Span(self._empty, tables.DIM),) if y == 1 and not self._count else (), width)
        if self._table is None:
            line = strip(self._line_at(index), max(width, 1) + self._shift)
            return line.crop(self._shift, self._shift + width)
        is_current = self._has_cursor and index == self._cursor and self.has_focus
        row = tables.line_of(self._table, self._table.rows[index], self._arranged(width))
        return strip(row, width, _REVERSED if is_current else None)

    def _arranged(self, width: int) -> tables.Layout:
        assert self._table is not None
        if self._layout is None or self._layout[0] != width:
            self._layout = width, tables.arrange(self._table, width)
        return self._layout[1]

    def _heading(self, width: int) -> Strip:
        text = tables.heading(self._table, self._arranged(width)) if self._table is not None else self._title
        notes = [self._note, page(self._first, self._visible, self._count)]
        right = cut("  ".join(filter(None, notes)), max(0, width - min(width_of(text), 12) - 2))
        shown = f"{padded(text, width - width_of(right) - 2)}  {right}" if right else padded(text, width)
        return strip((Span(shown),), width, _REVERSED if self.has_focus else _HEADING)

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()


def _no_line(index: int) -> Line:
    return ()
