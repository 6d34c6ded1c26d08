"""The agent's event loop: file descriptors, timers, signals and ended child processes, in one thread."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import socket
import time
from typing import Any, Callable

Callback = Callable[[], None]
CHECK_PENDING_EVERY = 0.001  # seconds
SLICE = 0.05  # seconds after which timers get their turn, however many files are ready


class Timer:
    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback = callback

    def cancel(self) -> None:
        self.callback = _nothing


def _nothing() -> None:
    return


class Loop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signals: dict[int, Callback] = {}
        self._running = True
        self._postponed: dict[int, int] = {}  # descriptors that the last iteration did not get to -> their order
        self._pending: set[int] = set()  # descriptors that were ready when `after_pending` was called
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def on_signal(self, number: int, callback: Callback) -> None:
        self._signals[number] = callback
        signal.signal(number, lambda *_: None)

    def on_child(self, callback: Callable[[int, int], None], then: Callback = _nothing) -> None:
        """Calls `callback(pid, wait status)` for every child that ends, including adopted ones; and `then` once after
        those that have ended at the same time, or of thousands after some of them."""

        def reap() -> None:
            until = self.now() + SLICE
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                callback(pid, status)
                if self.now() >= until:
                    self.after(0.0, reap)
                    break
            then()

        self.on_signal(signal.SIGCHLD, reap)

    def after(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.now() + seconds, next(self._order), timer))
        return timer

    def after_pending(self, longest: float, callback: Callback) -> None:
        """Calls `callback` once all files that are ready now have had their turn, which may take several iterations; at
        the latest after `longest` seconds. For one caller at a time."""
        self._pending = {key.fd for key, _ in self._selector.select(0)}
        deadline = self.now() + longest

        def check() -> None:
            if self._pending and self.now() < deadline:
                self.after(CHECK_PENDING_EVERY, check)
            else:
                callback()

        check()

    def watch(self, fileobj: Any, events: int, callback: Callback) -> None:
        """Calls `callback` when `fileobj` is ready. Watching the same object again replaces its events and callback."""
        if events == 0:
            self.unwatch(fileobj)
            return
        try:
            key = self._selector.get_key(fileobj)
        except KeyError:
            self._selector.register(fileobj, events, callback)
            return
        if key.events != events or key.data != callback:
            self._selector.modify(fileobj, events, callback)

    def unwatch(self, fileobj: Any) -> None:
        try:
            self._selector.unregister(fileobj)
        except (KeyError, ValueError):
            pass

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            self.once()

    def once(self, longest: float = 60.0) -> None:
        """One iteration, which waits `longest` seconds at most."""
        timeout = longest
        if self._timers:
            timeout = max(0.0, min(timeout, self._timers[0][0] - self.now()))
        self._serve([key for key, _ in self._selector.select(timeout)])
        now = self.now()
        while self._timers and self._timers[0][0] <= now and self._running:
            _, _, timer = heapq.heappop(self._timers)
            timer.callback()

    def _serve(self, ready: list[selectors.SelectorKey]) -> None:
        """Calls callbacks until SLICE has passed. The others are the first of the next iteration, so that none waits
        for those that are always ready."""
        if self._postponed:
            ready.sort(key=lambda key: self._postponed.get(key.fd, len(self._postponed)))
            self._postponed = {}
        self._pending.intersection_update(key.fd for key in ready)  # others were closed, or are not ready any more
        until = self.now() + SLICE
        for number, key in enumerate(ready):
            if number and self.now() >= until:
                self._postponed = {key.fd: order for order, key in enumerate(ready[number:])}
                return
            self._pending.discard(key.fd)
            try:
                current = self._selector.get_key(key.fileobj)
            except (KeyError, ValueError):
                continue  # an earlier callback of this iteration has closed it
            if current.data == key.data:  # its descriptor has not been reused
                key.data()

    def _woken(self) -> None:
        try:
            numbers = set(self._wake_read.recv(4096))
        except BlockingIOError:
            return
        for number in numbers:
            self._signals.get(number, _nothing)()
