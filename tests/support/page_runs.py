"""Folders of runs with a past of hours or weeks, some of which go on, for the page: nothing is trained."""

from __future__ import annotations

import fcntl
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent.series_files import Series

DAY = 86400.0
MOST_REPORTS = 200_000  # of each tier of series
PART = 8000  # lines of a file
HOSTS = 16  # that report resources


@dataclass(frozen=True)
class Failure:
    """`after` so many seconds a task fails, and everything starts again `down` seconds later."""

    after: float
    cause: str = "signal"
    down: float = 12.0


class PastRun:
    """A run as its captain has written it. If `is_live`, this process is its supervisor, and `report` continues it."""

    def __init__(
        self, home: Path, name: str, tasks: int, age: float, failures: Sequence[Failure] = (), *,
        framework: str = "torch", is_live: bool = True, evaluator: bool = False, slope: float = 3.0,
    ) -> None:  # fmt: skip
        self.name, self.tasks, self.age, self.slope = name, tasks, age, slope
        self.random = random.Random(name)
        self.workers = [f"worker-{number}" for number in range(tasks)]
        self.names = [*self.workers, *(["evaluator-0"] if evaluator else [])]
        self.hosts = [f"{name.replace('-', '-host-')}" for name in self.names]
        self.now = time.time()
        self.began = self.now - age
        self.folder = home / "runs" / name
        (self.folder / "logs").mkdir(parents=True)
        self.folder.chmod(0o700)
        self._write_small_files(framework)
        self._lock = (self.folder / "lock").open("w")
        if is_live:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._events = (self.folder / "events.jsonl").open("a")
        self.generation, self._snapshot = 1, ""
        self._gaps: list[tuple[float, float]] = []  # when nothing trains
        self._write_past(failures, framework)
        self._write_series()
        self._series = Series(str(self.folder))

    def _write_small_files(self, framework: str) -> None:
        info = {
            "run": self.name, "job": self.name.rpartition("-")[0], "framework": framework, "started": _at(self.began),
            "supervisor": 1, "detached": True,
        }  # fmt: skip
        (self.folder / "run.json").write_text(json.dumps(info))
        pairs = [{"name": name, "host": host} for name, host in zip(self.names, self.hosts, strict=True)]
        (self.folder / "plan.json").write_text(json.dumps({"tasks": pairs, "limits": {"grace": 2.0}}))

    def step_at(self, at: float) -> int:
        return max(0, int((at - self.began) * 7))

    def _write(self, at: float, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"at": _at(at), "event": kind, "generation": self.generation, **fields}
        self._events.write(json.dumps(event) + "\n")
        return event

    def _write_past(self, failures: Sequence[Failure], framework: str) -> None:
        self._write(
            self.began, "run-started", run=self.name, job=self.name.rpartition("-")[0], framework=framework,
            strategy="", tasks=self.names, hosts=self.hosts,
        )  # fmt: skip
        for host in self.hosts:
            self._write(self.began + self.random.uniform(0.5, 2), "member-joined", host=host)
        self._start(self.began + 2)
        saved = self.began
        for failure in [*failures, Failure(self.age)]:
            at = self.began + failure.after
            while saved + self.age / 24 < at:
                saved += self.age / 24
                self._commit(saved)
            if failure.after < self.age:
                self._fail(at, failure)
        self._events.flush()

    def _start(self, at: float) -> None:
        tasks = self.names if self.generation == 1 else self.workers
        self._write(at, "generation-formed", tasks=tasks, restore=self._snapshot or None)
        for name, host in zip(self.names, self.hosts, strict=True):
            if name in tasks:
                self._write(
                    at + 0.2, "task-started", task=name, pid=self.random.randint(2000, 60000), warm=False, host=host
                )
        for name in self.workers:
            first = at + self.random.uniform(4, 7)
            self._write(first, "step", task=name, **self._reported(first))

    def _commit(self, at: float) -> None:
        step = self.step_at(at)
        snapshot = f"step-{step}-g{self.generation}"
        self._write(at, "saved", step=step, snapshot=snapshot, stall_s=1.5)
        self._snapshot = snapshot
        self._write(at + 4, "committed", step=step, snapshot=snapshot, bytes=1_280_000_000, took_s=4.0)
        if "evaluator-0" in self.names:
            metrics = {"test_loss": self._loss(at) + 0.05, "test_accuracy": 1 - self._loss(at) / 2.8}
            self._write(at + 20, "evaluated", task="evaluator-0", step=step, snapshot=snapshot, metrics=metrics)

    def _fail(self, at: float, failure: Failure) -> None:
        task, killed = self.workers[len(self.workers) // 3], {"code": None, "signal": "SIGKILL"}
        detail = "killed by SIGKILL"
        if failure.cause == "hang":
            detail = "no step for 300 s"
            self._write(at, "hang", tasks=self.workers, silent_s=300.0, limit_s=300.0, progress="step")
            for name in self.workers[:8]:
                line = 60 if name == task else 71
                self._write(at + 0.1, "stacks", task=name, text=f'File "train.py", line {line} in main\n')
        self._write(at + 0.2, "task-exited", task=task, **killed, expected=failure.cause == "hang")
        self._write(
            at + 0.3, "restart", cause=failure.cause, task=task, detail=detail, scope=self.workers, delay_s=0.0,
            count=self.generation, limit=10,
        )  # fmt: skip
        for name in self.workers:
            if name != task:
                self._write(at + self.random.uniform(0.4, 2), "task-exited", task=name, **killed, expected=True)
        self.generation += 1
        silent = 300.0 if failure.cause == "hang" else 0.0
        self._gaps.append((at - silent, at + failure.down + 7))
        self._start(at + failure.down)
        self._write(at + failure.down + 7, "recovered", task=task, first_step_after_s=failure.down + 7)

    def end(self, status: str, reason: str = "") -> None:
        self._write(self.now, "run-ended", status=status, reason=reason, cause="program-error" if reason else None)
        self._events.flush()

    # ---- reports

    def _loss(self, at: float) -> float:
        return 2.4 * math.exp(-self.slope * (at - self.began) / max(1.0, self.age)) + 0.2

    def _reported(self, at: float) -> dict[str, Any]:
        loss = self._loss(at) + self.random.gauss(0, 0.03)
        rate = 3e-4 * (1 - 0.8 * (at - self.began) / max(1.0, self.age))
        metrics = {
            "loss": loss, "accuracy": 1 - loss / 3, "learning_rate": rate,
            "grad_norm": abs(self.random.gauss(1.2, 0.2)),
        }  # fmt: skip
        return {"step": self.step_at(at), "steps_per_s": self.random.gauss(7, 0.2), "metrics": metrics}

    def _used(self, at: float) -> dict[str, Any]:
        return {
            "cpu": abs(self.random.gauss(3.5, 0.3)), "memory": int(3e9 + 1e9 * (at - self.began) / self.age),
            "read_bytes_per_s": abs(self.random.gauss(2e6, 4e5)),
            "written_bytes_per_s": abs(self.random.gauss(4e5, 1e5)),
        }  # fmt: skip

    def _write_series(self) -> None:
        """As the captain would have left them: of the last hour everything, before that means."""
        now = self.now
        for tier, begin, end in (
            (300, self.began, now - DAY), (10, max(self.began, now - DAY), now - 3600),
            (1, max(self.began, now - 3600), now),
        ):  # fmt: skip
            span = max(0.0, end - begin - 8)
            every = max(tier, span * self.tasks / MOST_REPORTS)
            lines: list[dict[str, Any]] = []
            for number in range(int(span / every)):
                at = round(begin + 8 + number * every, 3)
                if not any(first <= at < last for first, last in self._gaps):
                    lines += [{"at": at, "task": name, "generation": 1, **self._reported(at)} for name in self.workers]
                if number % max(1, int(10 / every)) == 0:
                    lines += [
                        {"at": at, "task": name, "generation": 1, "resources": self._used(at)}
                        for name in self.workers[:HOSTS]
                    ]
            folder = self.folder / "series" / str(tier)
            folder.mkdir(parents=True)
            for place in range(0, len(lines), PART):
                part = [{"version": 1}, *lines[place : place + PART]]
                path = folder / f"{int(lines[place]['at'])}.jsonl"
                path.write_text("".join(json.dumps(line) + "\n" for line in part))

    def report(self) -> None:
        """Every task reports a step, and the first one prints a line."""
        at = time.time()
        for name in self.workers:
            self._series.add(self._write(at, "step", task=name, **self._reported(at)))
        self._events.flush()
        with (self.folder / "logs" / "worker-0.log").open("a") as log:
            log.write(f"{_at(at)} g{self.generation} | step {self.step_at(at)}: loss {self._loss(at):.4f}\n")

    def close(self) -> None:
        self._events.close()
        self._lock.close()


@contextmanager
def reporting(runs: Sequence[PastRun]) -> Iterator[None]:
    """All of them report each second."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(1.0):
            for run in runs:
                run.report()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _at(at: float) -> str:
    whole, fraction = divmod(at, 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int(fraction * 1000):03}Z"
