"""How soon `paceline watch` shows its first full screen, and what it costs afterwards: a run of 3 tasks, one of 1,000
tasks that report every second, a run of a month, and a list of 500 runs. No peer."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import measure

GOAL_S = 1.0
WATCHED_S = 10.0
DAY_S = 86400.0
COLUMNS, ROWS = 80, 24


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    machine_info = measure.machine("textual")
    measure.say(
        "From the start of the process until all panels are drawn, files in the page cache; then the share of a"
    )
    measure.say(f"core in {WATCHED_S:g} s, and how long a key takes. A terminal of {COLUMNS}x{ROWS}.")
    measure.say(f"On: {machine_info}\n")
    rows, results = [], {}
    with measure.workspace() as folder:
        for name, make in (("3 tasks", small), ("1,000 tasks", large), ("a month", month), ("500 runs", many)):
            home = folder / name.replace(" ", "-").replace(",", "")
            with make(home) as (run, pattern):
                times = [_first_screen(home, run, pattern) for _ in range(args.rounds + 1)][1:]
                share, key_s = _watched(home, run, pattern)
            middle = measure.median(times)
            assert middle is not None
            results[name] = {"first_screen_s": middle, "cpu_share": share, "key_s": key_s, "reached": middle <= GOAL_S}
            rows.append([name, measure.seconds(middle), measure.spread(times), f"{share:.0%}", measure.seconds(key_s)])
    measure.table([f"run (goal {GOAL_S:g} s)", "first screen", "(range)", "of a core", "key"], rows)
    measure.finish({"bench": "watch", "machine": machine_info, "rounds": args.rounds, "results": results})


# ---- the view in a terminal


class View:
    def __init__(self, home: Path, run: str) -> None:
        arguments = [sys.executable, "-m", "paceline.cli", "watch", *([run] if run else [])]
        environment = {
            **measure.environment(1), "PACELINE_HOME": str(home), "TERM": "xterm-256color", "LANG": "C.UTF-8",
        }  # fmt: skip
        self.began = time.perf_counter()
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.execve(arguments[0], arguments, environment)
        self.raw = b""

    def wait_for(self, pattern: str, limit: float = 30.0) -> float:
        """Seconds since its start."""
        while not re.search(pattern.encode(), self.raw):
            if time.perf_counter() - self.began > limit:
                raise measure.MeasurementFailed(f"{pattern!r} not within {limit:g} s: {self.raw[-2000:]!r}")
            self.read(0.01)
        return time.perf_counter() - self.began

    def read(self, seconds: float) -> None:
        if select.select([self._terminal], [], [], seconds)[0]:
            self.raw += os.read(self._terminal, 65536)

    def type(self, keys: str) -> None:
        self.raw = b""
        self.began = time.perf_counter()
        os.write(self._terminal, keys.encode())

    def end(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        try:
            while os.read(self._terminal, 65536):
                pass
        except OSError:
            pass
        os.waitpid(self.pid, 0)
        os.close(self._terminal)


def _first_screen(home: Path, run: str, pattern: str) -> float:
    view = View(home, run)
    try:
        return view.wait_for(pattern)
    finally:
        view.end()


def _watched(home: Path, run: str, pattern: str) -> tuple[float, float]:
    """The share of a core that the view uses, and the seconds until it reacts to a key."""
    view = View(home, run)
    try:
        view.wait_for(pattern)
        [child] = measure.descendants(view.pid)
        before, until = measure.cpu_seconds(child), time.perf_counter() + WATCHED_S
        while time.perf_counter() < until:
            view.read(0.1)
        share = (measure.cpu_seconds(child) - before) / WATCHED_S
        times = []
        for _ in range(5):
            view.type("?")
            times.append(view.wait_for("KEYS"))
            view.type("\x1b")
            view.wait_for(r"\? help|help")
        middle = measure.median(times)
        assert middle is not None
        return round(share, 3), middle
    finally:
        view.end()


# ---- runs that exist only as files


@contextmanager
def small(home: Path) -> Iterator[tuple[str, str]]:
    with _run(home, "digits-3f9a", 3, age_s=600.0) as run:
        _write_series(run, 3, 600.0, 1.0)
        yield "digits-3f9a", r"worker-2[^\n]*[\s\S]*ENDED BY[\s\S]*step 599"


@contextmanager
def large(home: Path) -> Iterator[tuple[str, str]]:
    """Each task reports every second while it is watched."""
    with _run(home, "large-3f9a", 1000, age_s=3600.0) as run:
        _write_series(run, 64, 600.0, 1.0)
        closing = threading.Event()

        def report() -> None:
            step = 4000
            while not closing.wait(1.0):
                step += 1
                _append(run, [_step(time.time(), task, step) for task in range(1000)])

        thread = threading.Thread(target=report)
        thread.start()
        try:
            yield "large-3f9a", r"worker-1[^\n]*[\s\S]*ENDED BY[\s\S]*step \d+"
        finally:
            closing.set()
            thread.join()


@contextmanager
def month(home: Path) -> Iterator[tuple[str, str]]:
    """64 tasks, for 30 days."""
    with _run(home, "month-3f9a", 64, age_s=30 * DAY_S) as run:
        _write_series(run, 64, 30 * DAY_S, 300.0, folder="300")
        _write_series(run, 64, 3600.0, 10.0)
        yield "month-3f9a", r"worker-1[^\n]*[\s\S]*ENDED BY[\s\S]*step 599"


@contextmanager
def many(home: Path) -> Iterator[tuple[str, str]]:
    for number in range(500):
        with _run(home, f"digits-{number:04}", 8, age_s=3600.0 + number, steps=5) as folder:
            pass
        report = {"run": folder.name, "status": "succeeded", "steps": 600, "started": _at(time.time() - 3600 - number)}
        (folder / "report.json").write_text(json.dumps({**report, "ended": _at(time.time())}))
    yield "", "digits-0010"


@contextmanager
def _run(home: Path, run: str, tasks: int, age_s: float, steps: int = 600) -> Iterator[Path]:
    """A folder as that of a run that is alive: its lock is held."""
    folder = home / "runs" / run
    (folder / "logs").mkdir(parents=True)
    now = time.time()
    names = [f"worker-{task}" for task in range(tasks)]
    info = {"run": run, "job": "bench", "framework": "none", "started": _at(now - age_s), "supervisor": os.getpid()}
    (folder / "run.json").write_text(json.dumps(info))
    plan = {"tasks": [{"name": name, "host": f"host-{name}"} for name in names], "limits": {"grace": 2.0}}
    (folder / "plan.json").write_text(json.dumps(plan))
    started = {"run": run, "job": "bench", "framework": "none", "strategy": "none", "tasks": names}
    hosts = [f"host-{name}" for name in names]
    events = [
        _event(now - age_s, "run-started", 0, **started, hosts=hosts),
        _event(now - age_s + 1, "generation-formed", tasks=names, restore=None),
        *(_event(now - age_s + 2, "task-started", task=n, pid=1, warm=False, host=f"host-{n}") for n in names),
    ]
    reporting = min(tasks, 8)  # events.jsonl has up to 2 MiB
    events += [_step(now - steps + step, task, step) for step in range(steps) for task in range(reporting)]
    _append(folder, events)
    for name in names:
        lines = "".join(f"{_at(now - 60 + line)} g1 | step {540 + line}\n" for line in range(60))
        (folder / "logs" / f"{name}.log").write_text(lines)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _write_series(run: Path, tasks: int, age_s: float, every_s: float, folder: str = "1") -> None:
    """Files of 1 MiB, as a captain writes them."""
    place = run / "series" / folder
    place.mkdir(parents=True, exist_ok=True)
    now = time.time()
    at, lines, first = now - age_s, ['{"version":1}'], now - age_s
    length = 0
    while at < now:
        for task in range(tasks):
            numbers: Any = [1.0, 1.5, 2.0] if every_s > 10 else 1.5
            line = {"at": int(at), "task": f"worker-{task}", "generation": 1, "step": int(at - now + age_s)}
            text = json.dumps({**line, "steps_per_s": numbers, "metrics": {"loss": numbers}}, separators=(",", ":"))
            lines.append(text)
            length += len(text)
        at += every_s
        if length >= 2**20 or at >= now:
            (place / f"{int(first)}.jsonl").write_text("\n".join(lines) + "\n")
            lines, first, length = ['{"version":1}'], at, 0


def _step(at: float, task: int, step: int) -> dict[str, Any]:
    return _event(at, "step", task=f"worker-{task}", step=step, metrics={"loss": 1 / (1 + step)}, steps_per_s=1.0)


def _event(at: float, kind: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"at": _at(at), "event": kind, "generation": generation, **fields}


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _append(folder: Path, events: list[dict[str, Any]]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


if __name__ == "__main__":
    main()
