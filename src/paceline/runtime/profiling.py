"""Profiles steps of this process with the profiler of its framework, on request of `paceline profile`.

The agent sends a request on the socket that also takes reports. The profiler starts after the next step that is
reported, in the thread that reports it, and stops so many steps later. Whatever fails is reported: the program goes on.
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
        """Stops it, for files that nobody needs."""


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
            raise RuntimeError("the program has used torch's profiler itself meanwhile")
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
        self._folder = folder
        self._step: Any = None

    def begin_step(self, step: int) -> None:
        self._end_step()
        self._step = self._profiler.StepTraceAnnotation("train", step_num=step)
        self._step.__enter__()

    def stop(self) -> None:
        self._end_step()
        self._profiler.stop_trace()

    def discard(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)  # it always writes its files

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
    def __init__(self, number: int, framework: str, steps: int, until: float, folder: str) -> None:
        self._number, self._framework, self._steps, self._until = number, framework, steps, until
        self._folder = folder
        self._profiler: Profiler | None = None
        self._thread = 0
        self._first = self._last = 0  # steps: the one after which the profiler started, and the last one

    def on_step(self, step: int) -> None:
        """A step is complete."""
        if self._profiler is not None and (threading.get_ident() != self._thread or step == self._last):
            return
        try:
            self._advance(step)
        except Exception as error:  # of the profiler: training goes on
            self.end()
            self._reply("failed", f"{type(error).__name__}: {error}")

    def _advance(self, step: int) -> None:
        is_late = time.monotonic() >= self._until
        if self._profiler is None:
            if is_late:  # nobody waits for it any more
                self.end()
                return
            self._thread, self._first, self._last = threading.get_ident(), step, step
            self._profiler = _PROFILERS[self._framework](self._folder)
            self._reply("started")
        elif step < self._last:
            self._first -= self._last - step  # the program has gone back to an earlier step
        self._last = step
        if is_late or step - self._first >= self._steps:
            profiler, self._profiler = self._profiler, None
            self.end()
            profiler.stop()
            self._reply("done")
        else:
            self._profiler.begin_step(step)

    def end(self) -> None:
        """Handles no more steps, and stops the profiler if it runs."""
        if report.on_step == self.on_step:
            report.on_step = None
        profiler, self._profiler = self._profiler, None
        try:
            if profiler is not None:
                profiler.discard()
        except Exception:
            return  # what it has failed with before is reported

    def _reply(self, stage: str, error: str = "") -> None:
        steps = self._last - self._first
        message = {"_": "profile", "request": self._number, "stage": stage, "steps": steps}
        report.send_to_agent({**message, "error": error[:LONGEST_ERROR]})


_current: _Request | None = None


def begin(message: dict[str, Any]) -> None:
    """Profiles the next steps, as the agent requests it. A request that has not been completed ends."""
    global _current
    if _current is None:
        atexit.register(_end)  # torch crashes if its profiler runs when the process exits
    else:
        _current.end()
    number, steps, until = int(message["request"]), int(message["steps"]), float(message["until"])
    _current = _Request(number, str(message["framework"]), steps, until, str(message["folder"]))
    report.on_step = _current.on_step


def _end() -> None:
    if _current is not None:
        _current.end()
