"""What the screens of a run and of all runs share: a reader in threads, and notes about requests."""

from __future__ import annotations

import threading
from typing import Protocol

from textual.message import Message
from textual.screen import Screen

from paceline.watch.tables import BAD, WARN, Span, plain


class Reader(Protocol):
    bug: Exception | None

    def start(self) -> None: ...

    def close(self) -> None: ...


class LiveScreen(Screen[None]):
    """`first`: the selector of the panel that has the focus at first."""

    first = "Panel"

    class Changed(Message):
        """The reader has something new."""

    class Noted(Message):
        """A request has ended."""

        def __init__(self, text: str, is_error: bool = False) -> None:
            super().__init__()
            self.text, self.is_error = text, is_error

    def __init__(self) -> None:
        super().__init__()
        self._has_message = threading.Event()
        self._note: Span | None = None

    def reader(self) -> Reader:
        raise NotImplementedError

    def update_view(self) -> None:
        raise NotImplementedError

    def on_mount(self) -> None:
        self.set_focus(self.query_one(self.first))
        self.reader().start()
        self.update_view()

    def on_unmount(self) -> None:
        self.reader().close()

    def on_reader_changed(self) -> None:
        """Called in threads of the reader; one message is enough until it is handled."""
        if not self._has_message.is_set():
            self._has_message.set()
            self.post_message(self.Changed())

    def on_live_screen_changed(self) -> None:
        self._has_message.clear()
        bug = self.reader().bug
        if bug is not None:
            raise bug
        self.update_view()

    def on_live_screen_noted(self, event: Noted) -> None:
        self._note = Span(plain(event.text), BAD if event.is_error else WARN)
        self.update_view()

    def on_resize(self) -> None:
        self.update_view()
