"""Faults in runs of TensorFlow and torch: each run recovers, and reports the right cause."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import runs
from support.runs import Run, alive, eventually, fill, job, order, orders, small_disk, steps_done

pytestmark = pytest.mark.long

SEED = 20261115
FULL = "log disk full"
LIMIT_S = 180.0  # for one recovery, on a busy machine
HANG_AFTER = {"tensorflow": "45s", "torch": "45s"}  # more than a cold start takes on a busy machine
KINDS = ("kill task", "kill agent", "kill captain", "stop task", "GIL loop", "exception", "port taken", FULL)
# What does not depend on the framework (agents, the captain, ports, disks) is not repeated with each of them. With JAX,
# kills are in test_kills.py, an exception is below.
TIMES = {"tensorflow": (3, 2, 2, 1, 0, 1, 1, 1), "torch": (1, 1, 1, 0, 1, 1, 1, 0)}

Note = Callable[[str, object], None]


def a_job(framework: str, state: Path, *arguments: str, **overrides: Any) -> dict[str, Any]:
    state.mkdir()
    strategy = {"strategy": "multi-worker"} if framework == "tensorflow" else {}
    return job(orders(framework, state, *arguments), framework=framework, **strategy, **overrides)


class Chaos:
    def __init__(self, run: Run, state: Path, framework: str, note: Note) -> None:
        self.run, self.state, self.framework, self.note = run, state, framework, note
        self.expected: list[tuple[str, str]] = []
        self.done = 0

    def inject(self, fault: str, rank: int) -> None:
        """Injects one fault, and checks everything that must follow from it."""
        task, after, began = f"worker-{rank}", self.run.position(), time.monotonic()
        cause = getattr(self, "_" + fault.lower().replace(" ", "_"))(task, rank, after)
        if cause:
            self.expected.append((cause, task))
            restart = self.run.wait("restart", LIMIT_S, after)
            assert (restart["cause"], restart["task"]) == (cause, task), f"{fault} of {task}\n{self.run.story()}"
            assert restart["delay_s"] == 0, "there were new steps since the last one"
            seconds = self.run.wait("recovered", LIMIT_S, after)["first_step_after_s"]
        else:
            seconds = None
        self._steps_flow(fault)
        self.done += 1
        self.note("fault", (self.framework, fault, task, cause or "-", seconds))
        print(f"{fault} {task} {cause} {seconds} {time.monotonic() - began:.1f}")

    def _steps_flow(self, fault: str) -> None:
        """All tasks do new steps."""
        before, after = steps_done(self.state), self.run.position()
        eventually(f"steps after {fault}", lambda: steps_done(self.state) > before + 2, LIMIT_S, self.run.story)
        for task in ("worker-0", "worker-1"):
            self.run.wait_for_step(LIMIT_S, after, task=task)

    def _kill_task(self, task: str, rank: int, after: int) -> str:
        os.kill(self.run.task(task), signal.SIGKILL)
        return "signal"

    def _kill_agent(self, task: str, rank: int, after: int) -> str:
        os.kill(self.run.agent(f"worker-host-{rank}"), signal.SIGKILL)
        return "host-lost"

    def _kill_captain(self, task: str, rank: int, after: int) -> str:
        tasks = self.run.tasks()
        os.kill(self.run.agent("captain"), signal.SIGKILL)
        assert self.run.wait("captain-returned", LIMIT_S, after)["adopted"] is True
        assert all(map(alive, tasks.values()))
        return ""

    def _stop_task(self, task: str, rank: int, after: int) -> str:
        os.kill(self.run.task(task), signal.SIGSTOP)
        return "hang"

    def _gil_loop(self, task: str, rank: int, after: int) -> str:
        order(self.state, rank, "gil")
        return "hang"

    def _exception(self, task: str, rank: int, after: int) -> str:
        order(self.state, rank, "raise")
        return "program-error"

    def _port_taken(self, task: str, rank: int, after: int) -> str:
        order(self.state, rank, "listen")
        return "port-in-use"

    def _log_disk_full(self, task: str, rank: int, after: int) -> str:
        ballast = fill(self.run.folder / "logs")
        self.run.wait("warning", LIMIT_S, after)
        self._steps_flow(FULL)
        ballast.unlink()
        return ""


def sequence(framework: str) -> list[tuple[str, int]]:
    dice = random.Random(f"{SEED} {framework}")
    faults = [fault for fault, times in zip(KINDS, TIMES[framework], strict=True) for _ in range(times)]
    dice.shuffle(faults)
    return [(fault, dice.randrange(2)) for fault in faults]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("framework", TIMES)
def test_a_long_run_with_one_fault_after_another(framework: str, tmp_path: Path, record_property: Note) -> None:
    state = tmp_path / "state"
    fields = a_job(framework, state, "--gate", restart={"hang_after": HANG_AFTER[framework], "limit": 3})
    with runs.starter(tmp_path) as start:
        run = start(fields)
        eventually("both tasks wait", lambda: len(list(state.glob("ready-*"))) == 2, LIMIT_S, run.story)
        with small_disk(run.folder / "logs", "4m"):
            (state / "go").touch()
            run.wait_for_step(LIMIT_S)
            chaos = Chaos(run, state, framework, record_property)
            for fault, rank in sequence(framework):
                chaos.inject(fault, rank)
            report = runs.finish(run, state, LIMIT_S, runs.TOGETHER)
    stacks = [f"{event['at']} {event['task']}\n{event['text']}" for event in run.events("stacks")]
    assert runs.causes(report) == chaos.expected, "\n".join([run.story(), *stacks])
    assert all(restart["first_step_after_s"] is not None for restart in report["restarts"])
    assert report["generations"] == len(chaos.expected) + 1
    assert chaos.done == sum(TIMES[framework])
    warnings = [event["text"] for event in run.events("warning")]
    disk_was_full = bool(TIMES[framework][KINDS.index(FULL)])
    assert disk_was_full <= len(warnings) <= 2 * disk_was_full and all("pace left" in text for text in warnings)


def test_an_exception_that_always_recurs_ends_the_run(tmp_path: Path, record_property: Note) -> None:
    with runs.starter(tmp_path) as start:
        run = start(a_job("jax", tmp_path / "state", "--always-raise", "2"))
        report = run.fails(LIMIT_S)
    assert [restart["cause"] for restart in report["restarts"]] == ["program-error"]
    assert report["cause"] == "program-error" and report["generations"] == 2
    for fragment in ("worker-1", "Injected: asked for by the test", "faults.py:", "same error at the same line twice"):
        assert fragment in report["reason"]
    record_property("fault", ("jax", "exception always", "worker-1", "program-error", None))
