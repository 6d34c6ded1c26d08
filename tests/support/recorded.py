"""A run's folder as a captain leaves it, written without a run: for tests of code that only reads."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from support.environment import without

DAY = "2026-11-15T04:30:"
FOLDER = "/runs/digits-3f9a"


def at(seconds: float) -> str:
    return f"{DAY}{seconds:06.3f}Z"


def event(seconds: float, kind: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"at": at(seconds), "event": kind, "generation": generation, **fields}


TASKS = ["worker-0", "worker-1", "evaluator-0"]
STARTED = event(
    0, "run-started", 0, run="digits-3f9a", job="digits", framework="tensorflow", strategy="multi-worker", tasks=TASKS,
    hosts=["worker-host-0", "worker-host-1", "evaluator-host-0"],
)  # fmt: skip
WAITING = event(1, "waiting", 0, missing=["worker-host-1"], since_s=12.0, limit_s=1800.0)
FORMED = event(2, "generation-formed", tasks=["worker-0", "worker-1"], restore=None)
STEP = event(6, "step", task="worker-0", step=120, metrics={"loss": 0.3123, "accuracy": 0.91}, steps_per_s=30.0)
KILLED = event(7, "task-exited", task="worker-1", code=None, signal="SIGKILL", expected=False)
RESTART = event(
    7.1, "restart", cause="signal", task="worker-1", detail="killed by SIGKILL", scope=["worker-0", "worker-1"],
    delay_s=0.0, count=1, limit=10,
)  # fmt: skip

RESOURCES = event(
    6.2, "resources", host="worker-host-1", gpus=[{"utilization": 0.85, "memory": 2**30, "memory_limit": 2**34}],
    machine={
        "memory": 7 * 2**30, "memory_limit": 2**33, "received_bytes_per_s": 2048, "sent_bytes_per_s": 1024,
    },
    tasks={
        "worker-1": {
            "cpu": 1.9, "memory": 6 * 2**30, "memory_peak": 7 * 2**30,
            "read_bytes_per_s": 0, "written_bytes_per_s": 512,
        },
    },
)  # fmt: skip
BEST = {"snapshot": "step-100-g1", "metric": "accuracy", "value": 0.9}
STARTED_WARM = event(
    11.28, "start-times", 2, task="worker-0", imports_s=0.1, joining_s=0.2, joined_s=0.3, restoring_s=1.8,
    restored_s=1.9, first_step_s=2.4,
)  # fmt: skip
EVALUATED = event(
    11.6, "evaluated", 2, task="evaluator-0", step=100, snapshot="step-100-g1", metrics={"accuracy": 0.9}, best=BEST,
)  # fmt: skip

# One event of every kind, in an order that a real run could have.
LIFE = [
    STARTED,
    event(0.5, "member-joined", 0, host="worker-host-0"),
    WAITING,
    event(1.5, "member-joined", 0, host="worker-host-1"),
    FORMED,
    event(2.1, "task-started", task="worker-0", pid=4711, warm=False, host="worker-host-0"),
    event(2.2, "task-started", task="worker-1", pid=4712, warm=False, host="worker-host-1"),
    event(4, "step", task="worker-0", step=60, metrics={"loss": 0.8}, steps_per_s=None),
    event(5, "saved", step=100, snapshot="step-100-g1"),
    event(5.5, "committed", step=100, snapshot="step-100-g1", bytes=1000, took_s=0.5),
    STEP,
    RESOURCES,
    event(6.5, "not-finite", task="worker-0", metric="loss", value="NaN", step=121),
    event(6.5, "spike", task="worker-0", metric="loss", value=9.5, usual=1.25, step=121),
    KILLED,
    event(7.05, "task-exited", task="worker-0", code=None, signal="SIGKILL", expected=True),
    RESTART,
    event(7.16, "ingest-started", host="worker-host-0", data="/data/3f9a8b7c6d5e4f30"),
    event(7.17, "ingest-failed", cause="signal", detail="killed by SIGKILL"),
    event(7.18, "ingest-done", data="/data/3f9a8b7c6d5e4f30", files=3, bytes=1000, took_s=0.1),
    event(7.19, "ingest-skipped", data="/data/3f9a8b7c6d5e4f30", files=3, bytes=1000, run="digits-1a2b"),
    event(7.19, "scaled", role="worker", count=2, was=3, tasks=["worker-0", "worker-1"]),
    event(7.191, "pausing", limit_s=600.0, now=False),
    event(7.192, "pause-canceled", reason="no new snapshot was committed within 600 s"),
    event(7.193, "paused", step=121, snapshot="step-100-g1"),
    event(7.194, "resumed", paused_s=0.001),
    event(7.2, "generation-formed", 2, tasks=["worker-0", "worker-1"], restore="step-100"),
    event(7.3, "task-started", 2, task="worker-0", pid=4720, warm=True, host="worker-host-0"),
    event(7.3, "task-started", 2, task="worker-1", pid=4721, warm=True, host="worker-host-1"),
    event(8.3, "step", 2, task="worker-0", step=101, metrics={"loss": 0.3}, steps_per_s=None),
    event(8.3, "recovered", 2, task="worker-1", first_step_after_s=1.3),
    event(10.3, "step", 2, task="worker-0", step=161, metrics={"loss": 0.2}, steps_per_s=30.0),
    event(11, "hang", 2, tasks=["worker-0", "worker-1"], silent_s=600.0, limit_s=600.0, progress="step"),
    event(11.1, "stacks", 2, task="worker-0", text='File "train.py", line 3'),
    event(11.2, "member-lost", 2, host="worker-host-1", reason="no word for 5 s"),
    event(11.25, "spare-ready", 2, host="worker-host-0", took_s=4.2),
    STARTED_WARM,
    event(11.3, "captain-returned", 2, adopted=True),
    event(11.35, "rotated", 2),
    event(11.36, "clock-changed", 2, shift_s=0.0),
    event(11.4, "note", 2, text="kubernetes is not used here"),
    event(11.5, "warning", 2, text="the disk is full"),
    EVALUATED,
    event(12, "task-exited", 2, task="worker-0", code=0, signal=None, expected=False),
    event(12.1, "ending", 2, reason="all workers have succeeded", grace_s=30.0),
    event(12.2, "run-ended", 2, status="succeeded", reason="all workers have succeeded", cause=None),
]


def write(
    home: Path,
    run: str = "digits-3f9a",
    events: list[dict[str, Any]] | None = None,
    report: dict[str, Any] | None = None,
    started: str = at(0),
    logs: dict[str, str] | None = None,
) -> Path:
    folder = home / "runs" / run
    (folder / "logs").mkdir(parents=True)
    job = run.rpartition("-")[0]
    info = {"run": run, "job": job, "framework": "tensorflow", "started": started, "supervisor": 1, "detached": False}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "plan.json").write_text(
        json.dumps({"tasks": [{"name": name} for name in TASKS], "limits": {"grace": 2.0}})
    )
    (folder / "lock").touch()
    lines = "".join(json.dumps(event) + "\n" for event in (LIFE if events is None else events))
    (folder / "events.jsonl").write_text(lines)
    if report is not None:
        (folder / "report.json").write_text(json.dumps({"run": run, "folder": str(folder), **report}))
    for task, text in (logs or {}).items():
        (folder / "logs" / f"{task}.log").write_text(text)
    return folder


REPORT: dict[str, Any] = {
    "status": "succeeded", "reason": "all workers have succeeded", "cause": None, "generations": 2, "steps": 161,
    "restarts": [
        {"cause": "signal", "task": "worker-1", "at": at(7.1), "detail": "killed by SIGKILL", "first_step_after_s": 1.3}
    ],
    "starts": [
        {
            "generation": 2,
            "tasks": {
                "worker-0": {"warm": True, **{k: v for k, v in STARTED_WARM.items() if k.endswith("_s")}},
                "worker-1": {"warm": True},
            },
            "advice": "1.5 s of 2.4 s in worker-0 before it restored its state: prepare data in `ingest`",
        }
    ],
    "steps_per_s": 30.0, "metrics": {"worker-0": {"loss": 0.2}}, "best": BEST, "started": at(0), "ended": at(12.2),
    "stacks": {},
}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of every file below the folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def supervised(folder: Path) -> Iterator[None]:
    """Holds the lock of a run, as its supervisor does."""
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment(home: Path) -> dict[str, str]:
    source = str(Path(paceline.__file__).parents[1])
    inherited = without("PACELINE", "NO_COLOR")
    return {**inherited, "PACELINE_HOME": str(home), "PYTHONPATH": source, "TZ": "UTC"}


def paceline_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *arguments]


@dataclass(frozen=True)
class Done:
    """The result of a call, like that of a process."""

    returncode: int
    stdout: str
    stderr: str


def call(
    home: Path, *arguments: str, cwd: Path | None = None, stdin: str = "", env: dict[str, str] | None = None
) -> Done:
    """Runs the command line in this process: new processes for hundreds of calls would take most of a minute."""
    from paceline.cli import app

    before, folder, broken_pipe = dict(os.environ), Path.cwd(), signal.getsignal(signal.SIGPIPE)
    streams = sys.stdin, sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", newline="")) for _ in streams]
        files[0].write(stdin)
        files[0].seek(0)
        try:
            os.environ.clear()
            os.environ.update({**environment(home), **(env or {})})
            time.tzset()
            os.chdir(cwd or home)
            sys.stdin, sys.stdout, sys.stderr = files
            code = app.main(arguments)
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(before)
            time.tzset()
            signal.signal(signal.SIGPIPE, broken_pipe)
        outputs = []
        for file in files[1:]:
            file.seek(0)
            outputs.append(file.read())
    return Done(code, *outputs)
