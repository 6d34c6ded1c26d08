"""Follows a run in the foreground: its output, what happens, a live line; and turns Ctrl-C into its end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Protocol

    from paceline.view.state import State

    class Running(Protocol):
        """A run that was just started, wherever it is."""

        def ended(self, timeout: float) -> bool: ...
        def stop(self, reason: str) -> bool: ...
        def kill(self) -> None: ...


_POLL_S = 0.1
_QUIET_POLL_S = 0.4  # where nothing has come for a while: training needs the cores
_PATIENCE_S = 10.0  # on top of the grace, until the run is ended without asking
_ONE_PRESS_S = 0.3
_PROGRESS_LINES = 4
_HUNG_UP = 128 + signal.SIGHUP
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Notes requests to stop instead of being interrupted by them."""

    def __init__(self) -> None:
        self.asked = False
        self.insisted = False
        self.hung_up = False  # the terminal is gone
        self._last = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in _CAUGHT:
            # nohup and the like have asked for a signal to be ignored: then it is.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        # A terminal that closes adds SIGHUP to what it sent before, and some wrappers pass on a Ctrl-C that the
        # terminal has sent us already: neither is a person asking twice.
        if self.asked and number != signal.SIGHUP and now - self._last > _ONE_PRESS_S:
            self.insisted = True
        self.asked, self._last = True, now
        self.hung_up = self.hung_up or number == signal.SIGHUP


def follow(
    running: Running, run: str, folder: Path, tasks: list[str], grace: float, signals: Signals, output: str
) -> int:
    # Only now: the tasks are starting meanwhile.
    from paceline.view import report, runs, state, terminal

    screen = terminal.Screen(sys.stderr)
    view = View(run, folder, tasks, screen)
    stopping = Stopping(running, grace, screen)
    leaves = runs.on_cluster(folder)  # what runs there needs no terminal here
    try:
        over, wait = False, _POLL_S
        while not over and not stopping.hopeless:
            over = running.ended(wait)
            wait = _POLL_S if view.update() else min(_QUIET_POLL_S, 1.5 * wait)
            if leaves and (signals.hung_up or screen.closed()):
                return _HUNG_UP
            stopping.consider(signals, screen.closed())
    except BaseException:
        # A mistake of ours must not leave a run behind that nobody watches; on a cluster, its captain does.
        if not leaves:
            running.kill()
        raise
    view.finish()
    if not over:
        screen.line(f"something of it still runs; see: paceline status {run}")
    standing = state.read(runs.Run(run, folder), over=over)
    if output == "json":
        _print(standing.report)
    screen.show([""] if view.spoke else [])
    screen.show(report.text(standing.report, report.snapshots(standing)))
    return exit_code(str(standing.report.get("status")), stopping.asked)


def exit_code(status: str, asked: bool) -> int:
    if status == "succeeded":
        return 0
    return 130 if asked or status == "stopped" else 1


def _print(data: dict[str, Any]) -> None:
    from paceline.cli.say import print_json
    from paceline.view import terminal

    try:
        print_json(data)
    except OSError:
        terminal.silence(sys.stdout)


class Stopping:
    """What a request to stop leads to: asked once, the run has its grace; twice, or too slow, it is ended."""

    def __init__(self, running: Running, grace: float, screen: Any) -> None:
        self._running = running
        self._grace = grace
        self._screen = screen
        self._asked_at: float | None = None
        self._killed_at: float | None = None

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def hopeless(self) -> bool:
        return self._killed_at is not None and time.monotonic() - self._killed_at > _PATIENCE_S

    def consider(self, signals: Signals, reader_gone: bool) -> None:
        from paceline.view.words import span

        now = time.monotonic()
        if self._asked_at is None and (signals.asked or reader_gone):
            self._asked_at = now
            self._screen.line(f"stopping: tasks have {span(self._grace)}; Ctrl-C again ends them at once")
            self._ask("interrupted" if signals.asked else "the terminal is gone")
        if self._asked_at is None or self._killed_at is not None:
            return
        if signals.insisted:
            self._end("ending all tasks at once")
        elif now - self._asked_at > self._grace + _PATIENCE_S:
            self._end(f"not over {span(self._grace + _PATIENCE_S)} after it was asked: ending all tasks at once")

    def _ask(self, reason: str) -> None:
        """Asks until there is an answer: a captain that was started a moment ago has none yet."""

        def ask() -> None:
            while self._killed_at is None and not self._running.stop(reason):
                time.sleep(_POLL_S)

        threading.Thread(target=ask, daemon=True).start()

    def _end(self, words: str) -> None:
        self._killed_at = time.monotonic()
        self._screen.line(words)
        self._running.kill()


class View:
    """Output and events of a run as they come, and one line that says how it stands."""

    def __init__(self, run: str, folder: Path, tasks: list[str], screen: Any) -> None:
        from paceline.view import events, logs
        from paceline.view.state import State

        self._run = run
        self._screen = screen
        self._events = events.follow(folder)
        self._logs = logs.Logs(folder)
        self._prefix = logs.Prefixer(tasks, screen.colours)
        self._state = State()
        self._progress: dict[str, Any] = {}  # the newest state of each progress bar
        self._begun = time.monotonic()
        self._waiting_said = -60.0
        self.spoke = False

    def update(self) -> bool:
        """Whether there was anything new."""
        return self._show(self._logs.more())

    def finish(self) -> None:
        while lines := self._logs.more():
            self._show(lines)
        self._show(self._logs.rest(), last=True)
        self._logs.close()
        self._events.close()

    def _show(self, lines: list[Any], last: bool = False) -> bool:
        from paceline.view.terminal import clean

        told = self._said(last)
        shown = list(told)
        for line in lines:
            before = self._progress.pop(line.task, None)
            if before is not None and before.generation != line.generation:
                shown.append(self._prefix(before))
            if line.progress:
                self._progress[line.task] = line
            else:
                text = clean(line.text, self._screen.colours) if self._screen.live else line.text
                shown.append(self._prefix(_with(line, text)))
        if last:
            shown += [self._prefix(line) for line in self._progress.values()]
        self.spoke = self.spoke or bool(shown)
        below = [] if last else [*self._bars(), live_line(self._run, self._state, time.monotonic() - self._begun)]
        self._screen.show(shown, below)
        return bool(shown)

    def _bars(self) -> list[str]:
        newest = list(self._progress.values())[-_PROGRESS_LINES:]
        return [self._prefix(line, plain=True) for line in newest]

    def _said(self, last: bool) -> list[str]:
        from paceline.view import events, words
        from paceline.view.state import fold

        said = []
        while lines := self._events.read():
            for event in filter(None, map(events.parse, lines)):
                fold([event], self._state)
                if words.important(event) and not self._repeated(event) and event.kind != "run-ended":
                    said.append(self._own(words.say(event)))
        return said

    def _repeated(self, event: Any) -> bool:
        """On a terminal the live line counts the wait; elsewhere once a minute is enough."""
        if event.kind != "waiting":
            return False
        now = time.monotonic()
        if self._screen.live or now - self._waiting_said < 60:
            return True
        self._waiting_said = now
        return False

    def _own(self, words: str) -> str:
        from paceline.view.terminal import bold

        return bold(f"* {words}") if self._screen.colours else f"* {words}"


def _with(line: Any, text: str) -> Any:
    if text is line.text:
        return line
    from dataclasses import replace

    return replace(line, text=text)


def live_line(run: str, state: State, elapsed: float) -> str:
    """digits-3f9a: generation 2, step 120, loss 0.312, 31.2 steps/s, 1 restart, 0:41"""
    from paceline.view.words import count, figure, metrics, say

    if state.ending:
        parts = [f"ending: {state.ending}"]
    elif state.waiting is not None:
        parts = [say(state.waiting)]
    elif state.status == "starting":
        parts = ["starting"]
    else:
        parts = [f"generation {state.generation}"]
        parts += [f"step {state.steps}"] if state.steps else []
        parts += [metrics(state.last_metrics, most=2)]
        parts += [f"{figure(state.speed)} steps/s"] if state.speed else []
        parts += [count(len(state.restarts), "restart")]
    minutes, seconds = divmod(int(elapsed), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return f"{run}: {', '.join([*filter(None, parts), clock])}"
