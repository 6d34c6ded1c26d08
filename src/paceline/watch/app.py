"""The textual application of the terminal view."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from typing import Any, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType

from paceline.client.reading.find_run import Target
from paceline.client.run import Run
from paceline.watch.dialogs import FilterInput
from paceline.watch.run_screen import RunScreen
from paceline.watch.runs_screen import RunsScreen


class WatchApp(App[int]):
    CSS = "* { scrollbar-size: 0 0; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, run: Run | None, target: Target, ascii_only: bool = False) -> None:
        """`run`: None shows all runs. `ascii_only`: the terminal may not be able to show other characters."""
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"  # the colors of the terminal
        self.animation_level = "none"
        self.ascii_only = ascii_only
        self.error: Exception | None = None
        self.terminal_settings: list[Any] | None = None  # while the view is shown
        self._run, self._target = run, target

    async def on_mount(self) -> None:
        self.terminal_settings = termios.tcgetattr(1) if os.isatty(1) else None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        screen = RunsScreen(self._target) if self._run is None else RunScreen(self._run, is_only=True)
        await self.push_screen(screen)

    async def on_event(self, event: events.Event) -> None:
        """The filter gets its keys at once: see FilterInput."""
        is_new = isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded
        field = self.focused if is_new else None
        if not isinstance(field, FilterInput):
            await super().on_event(event)
        elif isinstance(event, events.Paste):
            field.type_text("".join(event.text.splitlines()[:1]))
        elif isinstance(event, events.Key) and event.is_printable and event.character is not None:
            field.type_text(event.character)
        elif isinstance(event, events.Key) and not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)

    def _end(self, number: int) -> None:
        self.exit(128 + number)

    def _set_pointer_shape(self, shape: str) -> None:
        """There is no mouse, and old terminals print the sequence."""

    def _handle_exception(self, error: Exception) -> None:
        """Textual would print a long traceback; the command line reports the error as it does for all commands."""
        self.error = self.error or error
        self.exit(1)


def is_ascii_only() -> bool:
    """Whether the locale or the terminal shows only ASCII."""
    if os.environ.get("TERM", "").startswith(("vt", "linux")):
        return True
    locale = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    return "utf" not in locale.lower()
