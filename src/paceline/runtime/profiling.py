"""Profiles steps of this process with the profiler of its framework, on request of `paceline profile`.

The agent sends a request on the socket that also takes reports. The profiler starts after the next step that is
reported, in the thread that reports it, and stops so many steps later, or at the first report after the time limit.
Whatever fails is reported: the program continues.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import threading
import time
from typing import Any, Protocol

from paceline.runtime import report

LONGEST_ERROR = 1000  # characters


class Profiler(Protocol):
    """A profiler that runs."""

    def begin_step(self, step: int) -> None:
        """`step`: the last one that was completed."""

    def stop(self) -> None:
        """Writes the files."""

    def discard(self) -> None:
        """Stops it, for files that nobody needs: it may still write them."""


class _Torch:
    def __init__(self, folder: str) -> None:
        self._torch = torch = _imported("torch")
        if self._is_recording():
            raise RuntimeError("the program uses torch's profiler itself")
        record = torch.profiler.ProfilerAction.RECORD
        self._path = f"{folder}/{time.time_ns()}.pt.trace.json"
        self._profile = torch.profiler.profile(schedule=lambda _: record)  # with a schedule, it marks the steps
        self._profile.start()
        self._has_begun = False

    def begin_step(self, step: int) -> None:
        if self._has_begun:
            self._profile.step()
        self._has_begun = True

    def stop(self) -> None:
        if not self._is_recording():  # torch would crash
            raise RuntimeError("the program used torch's profiler itself in the meantime")
        self._profile.stop()
        self._profile.export_chrome_trace(self._path)

    def discard(self) -> None:
        if self._is_recording():
            self._profile.stop()

    def _is_recording(self) -> bool:
        """There is one profiler per process: a second one takes the place of the first, which must not be used then."""
        return bool(self._torch.autograd._profiler_enabled())


class _TensorFlow:
    def __init__(self, folder: str) -> None:
        self._profiler = _imported("tensorflow").profiler.experimental
        self._profiler.start(folder)
        self._step: Any = None

    def begin_step(self, step: int) -> None:
        self._end_step()
        self._step = self._profiler.Trace("train", step_num=step, _r=1)
        self._step.__enter__()

    def stop(self) -> None:
        self._end_step()
        self._profiler.stop()

    def discard(self) -> None:
        self._end_step()
        self._profiler.stop(save=False)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


class _Jax:
    def __init__(self, folder: str) -> None:
        self._profiler = _imported("jax").profiler
        self._profiler.start_trace(folder)
        self._step: Any = None

    def begin_step(self, step: int) -> None:
        self._end_step()
        self._step = self._profiler.StepTraceAnnotation("train", step_num=step)
        self._step.__enter__()

    def stop(self) -> None:
        self._end_step()
        self._profiler.stop_trace()

    def discard(self) -> None:
        self.stop()  # it always writes its files

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


_PROFILERS: dict[str, Any] = {"torch": _Torch, "tensorflow": _TensorFlow, "jax": _Jax}


def _imported(name: str) -> Any:
    """Importing a framework in the middle of training could take long, and change the program."""
    module = sys.modules.get(name)
    if module is None:
        raise RuntimeError(f"the program has not imported {name}")
    return module


class _Request:
    def __init__(
        self, number: int, framework: str, steps: int, until: float, discard_after: float, folder: str
    ) -> None:
        """`until`: when the profile ends if the steps are not complete. `discard_after`: when the agent has given up.
        Both are times of the machine's monotonic clock."""
        self._number, self._framework, self._steps = number, framework, steps
        self._until, self._discard_after = until, discard_after
        self._folder = folder
        self._profiler: Profiler | None = None
        self._thread = 0
        self._first = self._last = 0  # steps: the one after which the profiler started, and the last one
        self._is_over = False
        self._unsent: list[dict[str, Any]] = []  # replies for which the agent was too busy

    def on_report(self, step: int | None) -> None:
        """A step is complete, or the program has reported something else (None)."""
        if self._is_over:
            self._send()
            return
        if self._profiler is not None and (threading.get_ident() != self._thread or step == self._last):
            return
        try:
            self._advance(step)
        except Exception as error:  # of the profiler: training continues
            self._stop_profiler()
            self._finish("failed", f"{type(error).__name__}: {error}")
        self._send()

    def _advance(self, step: int | None) -> None:
        now = time.monotonic()
        is_late = now >= self._until
        if now >= self._discard_after or (is_late and self._profiler is None):  # nobody waits for it any more
            self._discard()
            return
        if self._profiler is None:
            if step is None:
                return
            self._thread, self._first, self._last = threading.get_ident(), step, step
            self._profiler = _PROFILERS[self._framework](self._folder)
            self._reply("started")
        if step is not None:
            if step < self._last:
                self._first -= self._last - step  # the program has gone back to an earlier step
            self._last = step
        if is_late or self._last - self._first >= self._steps:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            if time.monotonic() >= self._discard_after:  # writing the files has taken too long
                self._discard()
            else:
                self._finish("done")
        elif step is not None:
            self._profiler.begin_step(step)

    def end(self) -> None:
        """Handles no more steps; a profile that is not complete is discarded."""
        if not self._is_over:
            self._discard()
        self._send()
        self._unsent = []
        self._unhook()

    def _discard(self) -> None:
        self._stop_profiler()
        shutil.rmtree(self._folder, ignore_errors=True)  # the agent may have removed it before it was written to
        self._finish("discarded")

    def _stop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        try:
            if profiler is not None:
                profiler.discard()
        except Exception:
            return  # what it has failed with before is reported

    def _finish(self, stage: str, error: str = "") -> None:
        self._is_over = True
        self._reply(stage, error)

    def _reply(self, stage: str, error: str = "") -> None:
        steps = self._last - self._first
        message = {"_": "profile", "request": self._number, "stage": stage, "steps": steps}
        self._unsent.append({**message, "error": error[:LONGEST_ERROR]})

    def _send(self) -> None:
        """Replies that the agent cannot take now are sent at the next report."""
        while self._unsent and report.send_to_agent(self._unsent[0]):
            del self._unsent[0]
        if self._is_over and (not self._unsent or time.monotonic() >= self._discard_after):
            self._unhook()

    def _unhook(self) -> None:
        if report.on_report == self.on_report:
            report.on_report = None


_current: _Request | None = None


def begin(message: dict[str, Any]) -> None:
    """Profiles the next steps, as the agent requests it. A request that has not been completed ends."""
    global _current
    if _current is None:
        atexit.register(_end)  # torch crashes if its profiler runs when the process exits
    else:
        _current.end()
    number, steps, until = int(message["request"]), int(message["steps"]), float(message["until"])
    discard_after = float(message["discard_after"])
    _current = _Request(number, str(message["framework"]), steps, until, discard_after, str(message["folder"]))
    report.on_report = _current.on_report


def _end() -> None:
    if _current is not None:
        _current.end()
