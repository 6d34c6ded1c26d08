"""Follows a run in the foreground: prints its output, events and a live status line; stops it on Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.cli.exit_codes import exit_code

if TYPE_CHECKING:
    from typing import Protocol

    from paceline.view.output.merged_logs import Line
    from paceline.view.state.events import Event
    from paceline.view.state.run_state import State

    class Running(Protocol):
        """A run that was just started, on this machine or on a cluster."""

        def ended(self, timeout: float) -> bool: ...
        def stop(self, reason: str, interrupt: bool = False) -> bool: ...
        def kill(self) -> object: ...


_POLL_S = 0.1
_QUIET_POLL_S = 0.4  # polling interval if nothing is new for a while: leave the cores to training
_PATIENCE_S = 10.0  # seconds after the grace period until the run is killed
_ONE_PRESS_S = 0.3
_PROGRESS_LINES = 4
_HUNG_UP = 128 + signal.SIGHUP
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Records signals that request a stop, instead of being interrupted by them."""

    def __init__(self) -> None:
        self.stop_requested = False
        self.interrupted = False  # the request was Ctrl-C
        self.kill_requested = False
        self.hung_up = False  # the terminal was closed
        self._last = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in _CAUGHT:
            # A signal that is already ignored, as under nohup, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        # A closing terminal sends SIGHUP after other signals, and some wrappers forward a Ctrl-C that the terminal has
        # already sent us: neither is a second request by the user.
        if self.stop_requested and number != signal.SIGHUP and now - self._last > _ONE_PRESS_S:
            self.kill_requested = True
        self.interrupted = self.interrupted or (number == signal.SIGINT and not self.stop_requested)
        self.stop_requested, self._last = True, now
        self.hung_up = self.hung_up or number == signal.SIGHUP


def follow(
    running: Running,
    run: str,
    folder: Path,
    tasks: list[str],
    grace: float,
    signals: Signals,
    output: str,
    verbose: bool = False,
) -> int:
    # Imported here: the tasks start in the meantime.
    from paceline.view.files import run_folders
    from paceline.view.report import run_report
    from paceline.view.state import status_reader
    from paceline.view.text import terminal

    screen = terminal.Screen(sys.stderr)
    view = View(run, folder, tasks, screen, verbose)
    stopping = Stopping(running, grace, screen)
    on_cluster = run_folders.on_cluster(folder)  # a run on a cluster continues without this terminal
    try:
        ended, wait = False, _POLL_S
        while not ended and not stopping.gave_up:
            ended = running.ended(wait)
            wait = _POLL_S if view.update() else min(_QUIET_POLL_S, 1.5 * wait)
            if on_cluster and (signals.hung_up or screen.closed()):
                return _HUNG_UP
            stopping.update(signals, screen.closed())
    except BaseException:
        # An error here must not leave an unsupervised run behind; on a cluster, the captain supervises it.
        if not on_cluster:
            running.kill()
        raise
    view.finish()
    if not ended:
        screen.line(f"some of its processes are still running; see: paceline status {run}")
    standing = status_reader.read(run_folders.Run(run, folder), over=ended)
    if output == "json":
        from paceline.client.reading.run_status import report_form

        _print(report_form(standing.report))
    screen.show([""] if view.has_output else [])
    screen.show(run_report.text(standing.report, run_report.snapshots(standing)))
    return exit_code(str(standing.report.get("status")), stopping.requested)


def _print(data: dict[str, Any]) -> None:
    from paceline.cli.output import print_json
    from paceline.view.text import terminal

    try:
        print_json(data)
    except OSError:
        terminal.silence(sys.stdout)


class Stopping:
    """Handles stop requests: the first starts the grace period; a second, or the end of the period, kills the run."""

    def __init__(self, running: Running, grace: float, screen: Any) -> None:
        self._running = running
        self._grace = grace
        self._screen = screen
        self._requested_at: float | None = None
        self._killed_at: float | None = None
        self._unsent: tuple[str, bool] | None = None  # a request that no thread could send

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    @property
    def gave_up(self) -> bool:
        return self._killed_at is not None and time.monotonic() - self._killed_at > _PATIENCE_S

    def update(self, signals: Signals, terminal_closed: bool) -> None:
        from paceline.view.text.wording import span

        now = time.monotonic()
        if self._requested_at is None and (signals.stop_requested or terminal_closed):
            self._requested_at = now
            self._screen.line(f"stopping: tasks have {span(self._grace)} to finish; press Ctrl-C again to kill them")
            reason = "interrupted" if signals.stop_requested else "the terminal was closed"
            self._request_stop(reason, signals.interrupted)
        if self._requested_at is None or self._killed_at is not None:
            return
        if self._unsent is not None and self._running.stop(*self._unsent):
            self._unsent = None
        if signals.kill_requested:
            self._kill("killing all tasks")
        elif now - self._requested_at > self._grace + _PATIENCE_S:
            self._kill(f"still running {span(self._grace + _PATIENCE_S)} after the stop request: killing all tasks")

    def _request_stop(self, reason: str, interrupt: bool) -> None:
        """Repeats the request until the captain accepts it: one that has just started does not respond yet."""

        def request() -> None:
            while self._killed_at is None and not self._running.stop(reason, interrupt):
                time.sleep(_POLL_S)

        try:
            threading.Thread(target=request, daemon=True).start()
        except RuntimeError:  # the machine currently allows no more threads
            self._unsent = reason, interrupt

    def _kill(self, message: str) -> None:
        self._killed_at = time.monotonic()
        self._screen.line(message)
        self._running.kill()


class View:
    """Prints output and events of a run as they arrive, and keeps a live status line."""

    def __init__(self, run: str, folder: Path, tasks: list[str], screen: Any, verbose: bool = False) -> None:
        from paceline.view.output import merged_logs
        from paceline.view.output.progress_bar_display import ProgressBars
        from paceline.view.state import events
        from paceline.view.state.run_state import State

        self._run = run
        self._screen = screen
        self._verbose = verbose
        self._events = events.follow(folder)
        self._logs = merged_logs.Logs(folder)
        self._prefix = merged_logs.Prefixer(tasks, screen.colors)
        self._state = State()
        self._bars = ProgressBars(screen.live)
        self._begun = time.monotonic()
        self._waiting_printed_at = -60.0
        self.has_output = False

    def update(self) -> bool:
        """Returns whether there was anything new."""
        from paceline.view.output.output_with_events import ENDS, STARTS

        # Events first: the output that led to them is in the logs by then. That of a task that has ended must not wait,
        # as it is shown before its end, and before the next generation starts.
        new_events = self._read_events()
        lines = self._logs.more(unsettled=any(event.kind in (ENDS, STARTS) for event in new_events))
        return self._show(new_events, lines)

    def finish(self) -> None:
        new_events = self._read_events()
        while lines := self._logs.more():
            self._show(new_events, lines)
            new_events = []
        self._show(new_events, self._logs.rest(), last=True)
        self._logs.close()
        self._events.close()

    def _show(self, new_events: list[Event], lines: list[Line], last: bool = False) -> bool:
        from paceline.view.output.framework_noise import is_noise
        from paceline.view.output.merged_logs import Line
        from paceline.view.output.output_with_events import in_order

        if not self._verbose:
            lines = [line for line in lines if not is_noise(line.text)]
        new_lines: list[str] = []
        for entry in in_order(new_events, lines):
            if isinstance(entry, Line):
                new_lines += map(self._format, self._bars.add(entry))
            else:
                new_lines += self._describe(entry)
        if missed := self._logs.missed(last):
            new_lines.append(self._highlight(missed))
        new_lines += map(self._format, self._bars.finish() if last else self._bars.due())
        self.has_output = self.has_output or bool(new_lines)
        bars = [self._prefix(line, plain=True) for line in self._bars.states()[:_PROGRESS_LINES]]
        live_lines = [] if last else [*bars, live_line(self._run, self._state, time.monotonic() - self._begun)]
        self._screen.show(new_lines, live_lines)
        return bool(new_lines)

    def _format(self, line: Line) -> str:
        from paceline.view.text.terminal import clean

        text = clean(line.text, self._screen.colors) if self._screen.live else line.text
        return self._prefix(_with_text(line, text))

    def _describe(self, event: Event) -> list[str]:
        """The lines to print for an event: last states of progress bars that it ends, and its message."""
        from paceline.view.output.output_with_events import STARTS
        from paceline.view.state.run_state import fold
        from paceline.view.text import wording

        fold([event], self._state)
        bars = self._bars.end_before(event.names("tasks"), event.generation) if event.kind == STARTS else []
        lines = [self._format(line) for line in bars]
        if wording.important(event) and not self._repeated(event) and event.kind != "run-ended":
            lines.append(self._highlight(wording.describe(event)))
        return lines

    def _read_events(self) -> list[Event]:
        from paceline.view.state import events

        new_events: list[Event] = []
        while lines := self._events.read():
            new_events += filter(None, map(events.parse, lines))
        return new_events

    def _repeated(self, event: Event) -> bool:
        """On a terminal the live line shows the wait; elsewhere one message per minute is enough."""
        if event.kind != "waiting":
            return False
        now = time.monotonic()
        if self._screen.live or now - self._waiting_printed_at < 60:
            return True
        self._waiting_printed_at = now
        return False

    def _highlight(self, message: str) -> str:
        from paceline.view.text.terminal import bold

        return bold(f"* {message}") if self._screen.colors else f"* {message}"


def _with_text(line: Line, text: str) -> Line:
    if text is line.text:
        return line
    from dataclasses import replace

    return replace(line, text=text)


def live_line(run: str, state: State, elapsed: float) -> str:
    """digits-3f9a: generation 2, step 120, loss 0.312, 31.2 steps/s, 1 restart, 0:41"""
    from paceline.view.text.wording import count, describe, figure, metrics

    if state.ending:
        parts = [f"ending: {state.ending}"]
    elif state.waiting is not None:
        parts = [describe(state.waiting)]
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
