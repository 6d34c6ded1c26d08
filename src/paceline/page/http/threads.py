"""Runs blocking calls in threads, with limits on their number and on the time that a request waits for them.

The threads are daemons: a login that blocks does not keep the command from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from paceline.page.http.errors import Busy, TimeLimit

T = TypeVar("T")
MOST_OF_GROUP = 2  # threads at a time
_MOST_WAITING = 4  # calls of a group that wait for one of these
_WAIT_S = 10.0  # for one of these
_LATE_S = 10.0  # after which a call of a group is late: what it waits for may never respond
_MOST_LATE = 64  # late calls at a time that leave their places to others


class _Group:
    """Calls that wait for the same thing, such as a store."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(MOST_OF_GROUP)
        self.calls = 0  # including those that wait


class Threads:
    def __init__(self, most: int, most_waiting: int, seconds: float, what: str) -> None:
        """`most`: threads at a time, besides late ones. `seconds`: time limit of a call, including the time that it
        waits for a thread; a thread that takes longer works until it ends. `what`: is named in the message."""
        self._free = asyncio.Semaphore(most)
        self._late = 0
        self._waiting, self._most_waiting = 0, most_waiting
        self._seconds, self._what = seconds, what
        self._groups: dict[str, _Group] = {}

    async def run(self, call: Callable[[], T], seconds: float | None = None, group: str = "") -> T:
        """`group`: what the call may have to wait for, as text. If that does not respond, the calls of other groups
        still find threads: a group has few, its further calls are refused, and those that are late leave their places
        to others. Empty: the call belongs to no group."""
        if self._waiting >= self._most_waiting:
            raise Busy("too many requests at once", remedy="try again in a second")
        self._waiting += 1
        limit = self._seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):
                await self._enter(group)
                try:
                    await self._free.acquire()
                except BaseException:
                    self._leave(group)
                    raise
                return await self._start(call, group)
        except TimeoutError:
            raise TimeLimit(f"{self._what} took longer than {limit:g} s", remedy="try again") from None
        finally:
            self._waiting -= 1

    async def _enter(self, name: str) -> None:
        if not name:
            return
        group = self._groups.setdefault(name, _Group())
        if group.calls >= MOST_OF_GROUP + _MOST_WAITING:
            raise _still_waiting(name)
        group.calls += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await group.free.acquire()
        except BaseException as error:
            self._forget_call(name)
            if isinstance(error, TimeoutError):
                raise _still_waiting(name) from None
            raise

    def _leave(self, name: str) -> None:
        if name:
            self._groups[name].free.release()
            self._forget_call(name)

    def _forget_call(self, name: str) -> None:
        self._groups[name].calls -= 1
        if not self._groups[name].calls:
            del self._groups[name]

    def _start(self, call: Callable[[], T], group: str) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        has_place = True

        def on_late() -> None:
            nonlocal has_place
            if self._late < _MOST_LATE:
                self._late += 1
                has_place = False
                self._free.release()

        late = loop.call_later(_LATE_S, on_late) if group else None

        def leave() -> None:
            if late is not None:
                late.cancel()
            if has_place:
                self._free.release()
            else:
                self._late -= 1
            self._leave(group)

        def finish(result: T | None, error: BaseException | None) -> None:
            leave()
            if future.done():
                return  # the caller has stopped waiting
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = call()
            except TimeoutError as timeout:  # of the call itself: it must not be taken for the limit above
                error = OSError(str(timeout)) if type(timeout) is TimeoutError else timeout
            except BaseException as other:
                error = other
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(finish, result, error)

        try:
            threading.Thread(target=work, daemon=True).start()
        except BaseException:
            leave()
            raise
        return future


def _still_waiting(group: str) -> Busy:
    return Busy(f"{group} has not responded to earlier requests yet", remedy="try again later")
