"""Something that a thread keeps up to date while someone looks at it, and that streams send on when it changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from paceline.errors import PacelineError
from paceline.page.http.errors import unreadable
from paceline.page.http.responses import KEEP_ALIVE, error_form, sse
from paceline.page.http.threads import Threads

KEEP_ALIVE_S = 15.0
LINGER_S = 30.0  # after the last viewer has left, for one that returns
_BUSY, _LONGEST_PAUSE_S = 5, 5.0  # an update that takes long is done less often: others wait for this process, too


class Feed:
    """One thread for all viewers. It ends LINGER_S after the last one has left, and starts again for the next."""

    def __init__(self, poll_s: float, linger_s: float = LINGER_S) -> None:
        self.lock = threading.RLock()  # for what the thread writes and streams read
        self.version = 0
        self.problem: PacelineError | None = None  # why the thread gave up
        self.is_over = False  # nothing will change any more
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._poll_s, self._linger_s = poll_s, linger_s
        self._viewers, self._left_at = 0, time.monotonic()
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()  # set: read again at once

    # ---- for subclasses: called in the thread

    def open(self) -> None:
        """Before the first `update`, and again when a viewer returns."""

    def update(self) -> None:
        """Reads what is new; calls `publish` if that changes anything, and sets `is_over` if it was the last time."""

    def close(self) -> None:
        """After the last `update`."""

    def publish(self) -> None:
        self.version += 1
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._wake)

    def set_ready(self) -> None:
        """There is something to show, even if the first `update` has not returned."""
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._ready.set)

    # ---- for viewers: called in the event loop

    @property
    def is_idle(self) -> bool:
        """No viewer, and no thread."""
        return self._viewers == 0 and self._thread is None

    @asynccontextmanager
    async def viewed(self) -> AsyncIterator[None]:
        self._viewers += 1
        try:
            if self._thread is None and not self.is_over:
                self._ready.clear()
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            yield
        finally:
            self._viewers -= 1
            self._left_at = time.monotonic()

    async def ready(self) -> None:
        """Returns after the first update; raises its error."""
        if not self.is_over:
            await self._ready.wait()
        if self.problem is not None:
            raise self.problem

    async def changed(self, version: int, seconds: float) -> bool:
        """Whether there is something newer than this version, within some seconds."""
        if self.version == version and not self.is_over:
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()
        return self.version != version or self.is_over

    def leave_soon(self) -> None:
        """Ends the thread as soon as there is no viewer."""
        self._linger_s = 0.0
        self._wanted.set()

    def idle_since(self) -> float | None:
        """When its last viewer left, if it has none."""
        return self._left_at if self._viewers == 0 else None

    # ----

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end(self) -> None:
        self._thread = None
        self._ready.set()
        self._wake()
        if self._viewers and not self.is_over and self.problem is None:  # one came in the meantime
            self._ready.clear()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.problem = None
            self.open()
            while True:
                self._wanted.clear()
                began = time.monotonic()
                self.update()
                took = time.monotonic() - began
                self.set_ready()
                is_left = self._viewers == 0 and time.monotonic() - self._left_at > self._linger_s
                if self.is_over or is_left:
                    break
                self._wanted.wait(max(self._poll_s, min(_BUSY * took, _LONGEST_PAUSE_S)))
        except PacelineError as error:
            self.problem = error
        except OSError as error:
            self.problem = unreadable(error)
        except Exception as error:
            self.problem = PacelineError(f"this is a bug in Paceline: {type(error).__name__}: {error}")
        finally:
            try:
                self.close()
            finally:
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._end)


class Viewer(Protocol):
    """What one client was sent, and what is new for it."""

    @property
    def poll_s(self) -> float | None:
        """How often to look for something new even if the feed has not changed; None: never."""

    @property
    def has_more(self) -> bool:
        """Whether `changes` has left something out, which can be sent at once."""

    def changes(self) -> list[tuple[str, object]]:
        """Names and data of events. Called in a thread, after the client has taken the last ones."""


async def stream(feed: Feed, viewer: Viewer, reads: Threads, least_s: float) -> AsyncGenerator[bytes]:
    """Server-sent events. A client that is slow is not asked for more: it then gets the newest state. `least_s`:
    seconds between two batches of events."""

    def batch() -> bytes:
        return b"".join(sse(name, data) for name, data in viewer.changes())

    clock = asyncio.get_running_loop().time
    sent_at = clock()
    async with feed.viewed():
        try:
            await feed.ready()
            while True:
                version, is_over = feed.version, feed.is_over
                if events := await reads.run(batch):
                    yield events
                    sent_at = clock()
                elif clock() - sent_at >= KEEP_ALIVE_S:
                    yield KEEP_ALIVE
                    sent_at = clock()
                if feed.problem is not None:
                    raise feed.problem
                if viewer.has_more:
                    continue
                if is_over:
                    yield sse("end", {})
                    return
                await asyncio.sleep(least_s)
                await feed.changed(version, KEEP_ALIVE_S if viewer.poll_s is None else viewer.poll_s)
        except PacelineError as error:
            yield sse("failure", error_form(error))
