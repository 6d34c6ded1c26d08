"""Screens that show text over the view: logs, events, stacks, help; and the question before a run is stopped."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Input

from paceline.client.run import Run
from paceline.errors import PacelineError
from paceline.view.output.merged_logs import Logs
from paceline.view.state.events import Event
from paceline.view.text.option_names import text_of
from paceline.view.text.wording import clock, describe
from paceline.watch.run_screen_reader import KEPT_LINES, OUTPUT_EVERY_S, OutputReader
from paceline.watch.tables import BAD, BOLD, DIM, NAME, WARN, Line, Span, cut, fitting, plain
from paceline.watch.widgets import Lines, Panel

BACK = "Esc back"


def keys_line(keys: Sequence[str], width: int) -> Line:
    """The last line: `? help  q quit`."""
    spans: list[Span] = []
    for key in keys:
        name, _, meaning = key.partition(" ")
        if sum(len(span.text) for span in spans) + len(key) + 2 > width:
            break
        spans += [Span(name, BOLD), Span(f" {meaning}  ")]
    return tuple(spans)


class Filter:
    """A regular expression that lines must match."""

    def __init__(self) -> None:
        self.text = ""
        self.problem = ""
        self._pattern: re.Pattern[str] | None = None

    def set(self, text: str) -> None:
        from paceline.client.reading.run_logs import select
        from paceline.errors import UsageError

        try:
            self._pattern = select(grep=text).pattern if text else None
            self.text, self.problem = text, ""
        except UsageError as error:
            self.problem = error.what

    def matches(self, text: str) -> bool:
        return self._pattern is None or self._pattern.search(text) is not None

    @property
    def note(self) -> str:
        return f"filter: {plain(self.text)}" if self.text else ""


class FilterInput(Input):
    """One line at the bottom, shown while the filter is typed. The application passes it each key at once, instead of
    through its queue: keys that arrive together, as on a slow connection or if text is pasted, are part of the filter
    up to Enter, and those after it are for the screen."""

    DEFAULT_CSS = """
    FilterInput { height: 1; border: none; padding: 0; dock: bottom; display: none; background: ansi_default; }
    FilterInput:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    def __init__(self, on_end: Callable[[str | None], None]) -> None:
        """`on_end`: called with the text after Enter, with None after Esc; it moves the focus."""
        hint = "a regular expression; Enter shows only lines with a match"
        super().__init__(id="filter", placeholder=hint, select_on_focus=False, compact=True)
        self._on_end = on_end

    def open(self, text: str) -> None:
        self.value = text
        self.action_select_all()
        self.display = True
        self.screen.set_focus(self)

    def type_text(self, text: str) -> None:
        """Replaces the selection, if there is one."""
        self.replace(text, *self.selection)

    async def action_submit(self) -> None:
        self._end(self.value)

    def action_cancel(self) -> None:
        self._end(None)

    def _end(self, text: str | None) -> None:
        self.display = False
        self._on_end(text)


class TextScreen(Screen[None]):
    """Lines with a heading, which can be scrolled and filtered. Esc returns to the screen below."""

    CSS = "TextScreen { layout: vertical; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", show=False),
        Binding("slash", "filter", show=False, priority=True),
    ]
    KEYS: ClassVar[tuple[str, ...]] = (BACK, "/ filter", "PgUp/PgDn scroll", "End newest", "←/→ shift")

    def __init__(self, title: str, follows: bool = False) -> None:
        super().__init__()
        self._heading = title
        self._follows = follows
        self._filter = Filter()
        self._all: Sequence[Line] = ()
        self._empty = "reading..."
        self._dropped = 0

    def compose(self) -> ComposeResult:
        yield Panel("text", self._heading, follows=self._follows)
        yield Lines("keys")
        yield FilterInput(self._end_filter)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Panel))
        self._update()
        self.begin()

    def begin(self) -> None:
        """Starts reading; for screens that read something."""

    def on_resize(self) -> None:
        ascii_only = getattr(self.app, "ascii_only", False)
        keys = [key.replace("←/→", "Left/Right") if ascii_only else key for key in self.KEYS]
        self.query_one("#keys", Lines).show([keys_line(keys, self.size.width)])

    def set_lines(self, lines: Sequence[Line], empty: str = "nothing yet", dropped: int = 0) -> None:
        self._all, self._empty, self._dropped = lines, empty, dropped
        if self.is_mounted:
            self._update()

    def _update(self) -> None:
        shown = self._all
        if self._filter.text:
            shown = [line for line in shown if self._filter.matches("".join(span.text for span in line))]
        empty = self._filter.problem or ("no line matches the filter" if self._filter.text else self._empty)
        dropped = 0 if self._filter.text else self._dropped
        note = self._filter.problem or self._filter.note
        self.query_one(Panel).show_lines(len(shown), shown.__getitem__, note, empty, dropped)

    def action_back(self) -> None:
        if self._filter.text:
            self._filter.set("")
            self._update()
        elif self.is_current:  # a second key may arrive before the screen is gone
            self.dismiss()

    def action_filter(self) -> None:
        self.query_one(FilterInput).open(self._filter.text)

    def _end_filter(self, text: str | None) -> None:
        if text is not None:
            self._filter.set(text)
        self.set_focus(self.query_one(Panel))
        self._update()


class ReadingScreen(TextScreen):
    """A text that a thread reads, once or again and again."""

    def __init__(self, title: str, read: Callable[[ReadingScreen], None], follows: bool = False) -> None:
        """`read`: called in a thread; it calls `publish`, and ends when `closing` is set."""
        super().__init__(title, follows)
        self._read = read
        self.closing = threading.Event()
        self._bug: Exception | None = None
        self._latest: tuple[Sequence[Line], str, int] = ((), "reading...", 0)

    class Published(Message):
        """There are new lines."""

    def begin(self) -> None:
        threading.Thread(target=self._guarded, daemon=True).start()

    def _guarded(self) -> None:
        try:
            self._read(self)
        except (PacelineError, OSError) as error:
            self.publish([(Span(plain(text_of(error)), BAD),)])
        except Exception as error:
            self._bug = error
            self.publish([])

    def publish(self, lines: Sequence[Line], empty: str = "nothing yet", dropped: int = 0) -> None:
        """Called in the thread."""
        self._latest = lines, empty, dropped
        if not self.closing.is_set():
            self.post_message(self.Published())

    def on_reading_screen_published(self) -> None:
        if self._bug is not None:
            raise self._bug
        self.set_lines(*self._latest)

    def on_unmount(self) -> None:
        self.closing.set()


def log_screen(run: Run, task: str) -> ReadingScreen:
    """The output of one task, as it is printed."""

    def read(screen: ReadingScreen) -> None:
        logs = Logs(run.folder, lambda name: name == task)
        with closing(OutputReader(logs, KEPT_LINES)) as reader:
            is_new = True
            while True:
                if is_new:
                    output = reader.output()
                    lines = [_log_line(line.at, line.text) for line in output.lines]
                    screen.publish(lines, f"{plain(task)} has printed nothing", output.first)
                if screen.closing.wait(OUTPUT_EVERY_S):
                    return
                is_new = reader.read()

    return ReadingScreen(f"LOG of {plain(task)} of {plain(run.id)}", read, follows=True)


def _log_line(at: str, text: str) -> Line:
    return (Span(f"{clock(at)} ", DIM), Span(plain(text)))


def events_screen(run: Run) -> ReadingScreen:
    """All events but steps and resources, which are too many."""

    def read(screen: ReadingScreen) -> None:
        from paceline.view.state.events import EventFile

        lines: list[Line] = []
        with closing(EventFile(run.folder, old=True)) as file:
            is_first = True
            while True:
                is_new = is_first
                while (batch := file.read()) and not screen.closing.is_set():
                    new = [_event_line(event) for event, _ in batch if event.kind not in ("step", "resources")]
                    lines, is_new = [*lines, *new][-4 * KEPT_LINES :], is_new or bool(new)
                if is_new:
                    screen.publish(lines)
                is_first = False
                if screen.closing.wait(2 * OUTPUT_EVERY_S):
                    return

    return ReadingScreen(f"EVENTS of {plain(run.id)}", read, follows=True)


def _event_line(event: Event) -> Line:
    style = {"restart": BAD, "hang": BAD, "not-finite": BAD, "member-lost": BAD, "warning": WARN, "spike": WARN}
    return (Span(f"{clock(event.at)} ", DIM), Span(plain(describe(event)), style.get(event.kind, "")))


def stacks_screen(run: Run, task: str) -> ReadingScreen:
    """`task`: only of this task; empty: of all."""

    def read(screen: ReadingScreen) -> None:
        from paceline.view.diagnosis.stacks import describe as describe_stacks

        stacks = run.stacks(task or ())
        screen.publish([(Span(plain(line)),) for line in describe_stacks(list(stacks.processes))], "no stacks")

    subject = plain(task) if task else "all tasks"
    return ReadingScreen(f"STACKS of {subject} of {plain(run.id)}, innermost frame first", read)


class HelpScreen(TextScreen):
    KEYS: ClassVar[tuple[str, ...]] = (BACK,)

    def __init__(self, title: str, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__(title)
        self.set_lines([(Span(f"  {key:<12} ", NAME), Span(meaning)) for key, meaning in keys])


class Question(ModalScreen[bool]):
    """Asks before something is done; only `y` does it."""

    DEFAULT_CSS = """
    Question { align: center middle; background: ansi_default; }
    Question Vertical { width: 72; max-width: 100%; height: auto; border: ascii; padding: 0 1; }
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self._text = lines

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines("question")

    def on_mount(self) -> None:
        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        width = min(68, max(10, self.app.size.width - 4))
        lines = [(Span(cut(plain(text), width), BOLD if not number else ""),) for number, text in enumerate(self._text)]
        self.query_one(Lines).show([*lines, (), fitting([Span("y: yes", BOLD), Span("any other key: no")], width)])

    def on_key(self, event: Key) -> None:
        if self.is_current:  # only the first key counts
            self.dismiss(event.key in ("y", "Y"))
