"""The screen of all runs: a table, from which each run can be opened."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from paceline.client.reading.find_run import Target
from paceline.client.run import Run
from paceline.watch.dialogs import Filter, FilterInput, HelpScreen, keys_line
from paceline.watch.live_screen import LiveScreen
from paceline.watch.run_screen import RunScreen, ask_to_stop
from paceline.watch.runs_model import runs_table, runs_title
from paceline.watch.runs_screen_reader import RunsReader
from paceline.watch.tables import BAD, Line, Span, cut, fitting, plain
from paceline.watch.widgets import Lines, Panel

KEYS = ("? help", "Enter open", "/ filter", "x stop", "q quit")
HELP = (
    ("Up, Down", "select a run; PgUp, PgDn, Home, End work, too"),
    ("Enter", "open the run"),
    ("/", "show only runs whose row matches a regular expression"),
    ("x", "stop the run; asks first"),
    ("Esc", "remove the filter"),
    ("q, Ctrl-C", "quit; the runs continue"),
)


class RunsScreen(LiveScreen):
    CSS = "RunsScreen { layout: vertical; overflow: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "stop", show=False),
        Binding("slash", "filter", show=False, priority=True),
        Binding("question_mark,h,f1", "help", show=False),
        Binding("escape", "back", show=False),
    ]

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._reader = RunsReader(target, self.on_reader_changed)
        self._filter = Filter()

    def compose(self) -> ComposeResult:
        yield Lines("top")
        yield Panel("runs", has_cursor=True)
        yield Lines("keys")
        yield FilterInput(self._end_filter)

    def reader(self) -> RunsReader:
        return self._reader

    def update_view(self) -> None:
        if not self.is_mounted or self.size.width == 0:
            return
        width, runs = self.size.width, self._reader.runs
        self.query_one("#keys", Lines).show([keys_line(KEYS, width)])
        top: list[Line] = [fitting(runs_title(runs), width)]
        note = Span(plain(self._reader.problem), BAD) if self._reader.problem else self._note
        if note is not None:
            top.append((Span(cut(note.text, width), note.style),))
        self.query_one("#top", Lines).show(top)
        table = runs_table(runs or (), time.time())
        if self._filter.text:
            rows = [row for row in table.rows if self._filter.matches(" ".join(cell.text for cell in row.cells))]
            table = type(table)(table.columns, tuple(rows))
        empty = (
            "no run matches the filter" if self._filter.text else "no runs yet; start one with: paceline run job.yaml"
        )
        note_text = self._filter.problem or self._filter.note
        self.query_one(Panel).show_table(table, note_text, empty if runs is not None else "reading...")

    # ---- keys

    def _selected(self) -> Run | None:
        key = self.query_one(Panel).key
        return None if key is None else Run(key, self._target)

    def on_panel_chosen(self, event: Panel.Chosen) -> None:
        self.app.push_screen(RunScreen(Run(event.key, self._target), is_only=False))

    def action_stop(self) -> None:
        run = self._selected()
        if run is not None:
            ask_to_stop(self, run, lambda text, is_error: self.post_message(self.Noted(text, is_error)))

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen("KEYS", HELP))

    def action_back(self) -> None:
        self._filter.set("")
        self.update_view()

    def action_filter(self) -> None:
        self.query_one(FilterInput).open(self._filter.text)

    def _end_filter(self, text: str | None) -> None:
        if text is not None:
            self._filter.set(text)
        self.set_focus(self.query_one(Panel))
        self.update_view()
