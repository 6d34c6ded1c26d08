"""The screen of one run: numbers and curves above panels for tasks, generations, snapshots and output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from paceline.client.run import Run
from paceline.errors import PacelineError
from paceline.view.output.merged_logs import Line as LogLine
from paceline.view.text.option_names import text_of
from paceline.view.text.terminal import clean
from paceline.view.text.wording import figure, span
from paceline.watch import curves, run_screen_model
from paceline.watch.dialogs import (
    Filter,
    FilterInput,
    HelpScreen,
    Question,
    events_screen,
    keys_line,
    log_screen,
    stacks_screen,
)
from paceline.watch.live_screen import LiveScreen
from paceline.watch.run_screen_model import ORDERS, RunData
from paceline.watch.run_screen_reader import Output, RunReader
from paceline.watch.tables import DIM, NAME, Line, Span, cut, fitting, heights, padded, plain, width_of
from paceline.watch.widgets import Lines, Panel

if TYPE_CHECKING:
    from paceline.watch.app import WatchApp

RANGES = ((None, "whole run"), (3600.0, "last hour"), (600.0, "last 10 min"))
PANELS = ("tasks", "generations", "snapshots", "output")
KEYS = ("? help", "l log", "s stacks", "e events", "/ filter", "x stop", "Tab panel", "q quit")
HELP = (
    ("Up, Down", "move in the panel; PgUp, PgDn, Home, End work, too"),
    ("Tab", "next panel: tasks, generations, snapshots, output"),
    ("z", "zoom the panel, or show all panels again"),
    ("Enter, l", "log of the selected task"),
    ("s", "Python stacks of the selected task; S: of all tasks"),
    ("e", "events"),
    ("/", "show only output that matches a regular expression"),
    ("o", "order of the tasks: name, state, step, cpu, memory"),
    ("t", "time that the curves show: whole run, last hour, last 10 min"),
    ("x", "stop the run; asks first"),
    ("Esc", "remove the filter, or go back to all runs"),
    ("q, Ctrl-C", "quit; the run continues"),
    ("", ""),
    ("steps/s", "the current speed; the time left needs total_steps, see"),
    ("", "docs/watching.md. Goodput is the share of time spent on"),
    ("", "training that counts. `paceline status` prints all of it."),
)
_LABEL, _VALUE = 9, 22  # columns of the name of a curve, and of its numbers


class RunScreen(LiveScreen):
    first = "#tasks"
    CSS = "RunScreen { layout: vertical; overflow: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", show=False),
        Binding("s", "stacks", show=False),
        Binding("S", "all_stacks", show=False),
        Binding("e", "events", show=False),
        Binding("x", "stop", show=False),
        Binding("slash", "filter", show=False, priority=True),
        Binding("o", "order", show=False),
        Binding("t", "range", show=False),
        Binding("z", "zoom", show=False),
        Binding("question_mark,h,f1", "help", show=False),
        Binding("escape", "back", show=False),
        Binding("tab", "panel(1)", show=False, priority=True),
        Binding("shift+tab", "panel(-1)", show=False, priority=True),
    ]

    def __init__(self, run: Run, is_only: bool) -> None:
        """`is_only`: there is no list of runs below this screen."""
        super().__init__()
        self._run, self._is_only = run, is_only
        self._reader = RunReader(run, self.on_reader_changed)
        self._filter = Filter()
        self._order = self._range = 0
        self._zoomed = ""
        self._shown_output: Output | None = None

    def compose(self) -> ComposeResult:
        yield Lines("top")
        yield Panel("tasks", has_cursor=True)
        yield Panel("generations")
        yield Panel("snapshots")
        yield Panel("output", "OUTPUT", follows=True)
        yield Lines("keys")
        yield FilterInput(self._end_filter)

    def reader(self) -> RunReader:
        return self._reader

    @property
    def is_complete(self) -> bool:
        """Whether everything has been read once: for pictures."""
        data = self._reader.data
        return data is not None and any(curve.points for curve in data.curves) and bool(self._reader.output.lines)

    # ---- drawing

    @property
    def _ascii(self) -> bool:
        return cast("WatchApp", self.app).ascii_only

    def update_view(self) -> None:
        if not self.is_mounted or self.size.width == 0:
            return
        data, now, width = self._reader.data, time.time(), self.size.width
        self.query_one("#keys", Lines).show([keys_line(KEYS, width)])
        if data is None:
            problem = self._reader.problem
            self.query_one("#top", Lines).show([(Span(plain(self._run.id)), Span("  "), Span(problem or "reading..."))])
            return
        top = self._top(data, now, width)
        self.query_one("#top", Lines).show(top)
        tables = {
            "tasks": run_screen_model.task_table(data, ORDERS[self._order]),
            "generations": run_screen_model.generation_table(data, now),
            "snapshots": run_screen_model.snapshot_table(data, now),
        }
        notes = {"tasks": f"by {ORDERS[self._order]}" if self._order else ""}
        empty = {"tasks": "no tasks yet", "generations": "no generation yet", "snapshots": "no snapshots yet"}
        for name, table in tables.items():
            self.query_one(f"#{name}", Panel).show_table(table, notes.get(name, ""), empty[name])
        self._arrange(
            max(1, self.size.height - len(top) - 1), {name: len(table.rows) for name, table in tables.items()}
        )
        if self._reader.output is not self._shown_output:
            self._show_output()

    def _top(self, data: RunData, now: float, width: int) -> list[Line]:
        lines = [fitting(run_screen_model.title(data, now), width), fitting(run_screen_model.progress(data), width)]
        lines += self._curve_lines(data, now, width)
        reason = self._note or run_screen_model.reason(data)
        return [*lines, (Span(cut(reason.text, width), reason.style),)] if reason.text else lines

    def _curve_lines(self, data: RunData, now: float, width: int) -> list[Line]:
        rows = 1 if self.size.height < 34 else 2 if self.size.height < 50 else 3
        columns = width - _LABEL - _VALUE
        until = now if data.is_alive else data.ended or now
        seconds, range_name = RANGES[self._range]
        began = data.began if data.began is not None else until
        since = began if seconds is None else max(began, until - seconds)
        lines: list[Line] = []
        if columns >= 10:
            for curve in data.curves:
                values = curves.buckets(curve.points, since, until, columns)
                label = {"steps_per_s": "steps/s"}.get(curve.name, plain(curve.name))
                known = [value for value in values if value is not None]
                extent = " to ".join(dict.fromkeys(map(figure, (min(known), max(known))))) if known else "no values"
                for row, text in enumerate(curves.chart(values, rows, self._ascii)):
                    name = padded(label, _LABEL - 1) if row == 0 else " " * (_LABEL - 1)
                    right = f"  {extent}" if row == rows - 1 else ""
                    lines.append((Span(f"{name} ", DIM), Span(text, NAME), Span(cut(right, _VALUE), DIM)))
            if data.generations:
                marks = [(at, kind[0]) for at, kind in data.marks]  # s, p, r
                strip = curves.timeline(run_screen_model.periods(data), since, until, columns, self._ascii, marks)
                lines.append((Span(padded("gen", _LABEL), DIM), *strip, Span(f"  {range_name}", DIM)))
        return lines

    def _arrange(self, available: int, rows: dict[str, int]) -> None:
        if self._zoomed:
            lines = {name: available if name == self._zoomed else 0 for name in PANELS}
        else:
            lines = vars(heights(available, rows["tasks"], max(1, rows["generations"]), max(1, rows["snapshots"])))
        for name in PANELS:
            panel = self.query_one(f"#{name}")
            is_shown = lines[name] > 0
            if panel.display != is_shown:
                panel.display = is_shown
            height = panel.styles.height
            if is_shown and (height is None or height.value != lines[name]):
                panel.styles.height = lines[name]

    def _show_output(self) -> None:
        self._shown_output = output = self._reader.output
        lines = output.lines
        if self._filter.text:
            lines = tuple(line for line in lines if self._filter.matches(f"{line.task} | {clean(line.text, False)}"))
        names = width_of(max((line.task for line in lines), key=width_of, default=""))

        def line_at(index: int) -> Line:
            return _output_line(lines[index], names)

        empty = "no line matches the filter" if self._filter.text else "no output yet"
        dropped = 0 if self._filter.text else output.first
        note = self._filter.problem or self._filter.note or output.note
        self.query_one("#output", Panel).show_lines(len(lines), line_at, note, empty, dropped)

    # ---- keys

    def on_panel_chosen(self, event: Panel.Chosen) -> None:
        if event.panel.id == "tasks":
            self.action_log()

    def action_log(self) -> None:
        task = self.query_one("#tasks", Panel).key
        if task is not None:
            self.app.push_screen(log_screen(self._run, task))

    def action_stacks(self) -> None:
        self._show_stacks(self.query_one("#tasks", Panel).key or "")

    def action_all_stacks(self) -> None:
        self._show_stacks("")

    def _show_stacks(self, task: str) -> None:
        self.app.push_screen(stacks_screen(self._run, task))

    def action_events(self) -> None:
        self.app.push_screen(events_screen(self._run))

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen("KEYS", HELP))

    def action_order(self) -> None:
        self._order = (self._order + 1) % len(ORDERS)
        self.update_view()

    def action_range(self) -> None:
        self._range = (self._range + 1) % len(RANGES)
        self.update_view()

    def action_panel(self, step: int) -> None:
        if isinstance(self.focused, FilterInput):
            return
        shown = [name for name in PANELS if self.query_one(f"#{name}").display or self._zoomed]
        current = self.focused.id if self.focused is not None and self.focused.id in shown else shown[0]
        following = shown[(shown.index(str(current)) + step) % len(shown)]
        if self._zoomed:
            self._zoomed = following
            self.update_view()
        self.set_focus(self.query_one(f"#{following}"))

    def action_zoom(self) -> None:
        focused = self.focused.id if self.focused is not None else None
        self._zoomed = "" if self._zoomed else str(focused or PANELS[0])
        self.update_view()

    def action_back(self) -> None:
        if self._filter.text:
            self._set_filter("")
        elif self._zoomed:
            self.action_zoom()
        elif not self._is_only and self.is_current:
            self.dismiss()

    def action_filter(self) -> None:
        self.query_one(FilterInput).open(self._filter.text)

    def _end_filter(self, text: str | None) -> None:
        if text is not None:
            self._set_filter(text)
        name = self._zoomed or "output"
        panel = self.query_one(f"#{name}")
        self.set_focus(panel if panel.display else self.query_one("#tasks"))

    def _set_filter(self, text: str) -> None:
        self._filter.set(text)
        self._show_output()

    # ---- stopping the run

    def action_stop(self) -> None:
        ask_to_stop(self, self._run, lambda text, is_error: self.post_message(self.Noted(text, is_error)))


def ask_to_stop(screen: Screen[None], run: Run, note: Callable[[str, bool], object]) -> None:
    """Asks, then stops the run. `note`: called with a text, and whether it is an error; in any thread. What may have to
    ask a cluster runs in threads."""
    from paceline.client.control.stop import grace_of, is_running
    from paceline.view.files import run_folders
    from paceline.view.state import status_reader

    app = screen.app

    def prepare() -> None:
        try:
            record = run_folders.Run(run.id, run.folder)
            if not is_running(record):  # the screen may show an earlier state
                note(f"{run.id} is not running: {status_reader.summary(record)['status']}", False)
                return
            grace = span(grace_of(record))
        except (PacelineError, OSError) as error:
            note(text_of(error), True)
        else:
            app.call_from_thread(ask, grace)

    def ask(grace: str) -> None:
        def answered(is_confirmed: bool | None) -> None:
            if is_confirmed:
                note(f"stopping {run.id}: tasks have {grace} to finish", False)
                threading.Thread(target=stop, daemon=True).start()

        question = (f"Stop {run.id}?", f"Its tasks have {grace} to finish; committed snapshots are kept.")
        if not isinstance(app.screen, Question):
            app.push_screen(Question(question), answered)

    def stop() -> None:
        try:
            status = run.stop()
            note(f"{run.id} has ended: {status.status}", False)
        except (PacelineError, OSError) as error:
            note(text_of(error), True)

    threading.Thread(target=prepare, daemon=True).start()


def _output_line(line: LogLine, width: int) -> Line:
    return (Span(f"{padded(plain(line.task), width)} | ", NAME), Span(plain(line.text)))
