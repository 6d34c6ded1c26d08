"""Restarts of an example with its own job file: SIGKILL of one worker until every worker has done its next step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import measure

JOBS = {"translate": "examples/translate/words.yaml"}
GOAL = 0.4  # of a cold start in the same run
START_LIMIT = 300.0
RESTART_LIMIT = 120.0
EVERY = 0.1  # seconds between two looks at the events
STAGES = ("imports_s", "joining_s", "joined_s", "restoring_s", "restored_s", "first_step_s")

Event = dict[str, Any]


def main(program: str, rounds: int, kills: int) -> None:
    job = measure.ROOT / JOBS[program]
    machine_info = measure.machine("tensorflow-cpu")
    measure.say(f"SIGKILL of one worker of {JOBS[program]} until every worker has done a step in a new process,")
    measure.say("killed once its spares are ready and a snapshot is committed.")
    measure.say("peer: the cold start of the same run, from the start of the first worker to the first step of all.")
    measure.say(f"On: {machine_info}\n")
    times: dict[str, list[float]] = {"paceline": [], "cold": []}
    stages: dict[str, list[Event]] = {"paceline": [], "cold": []}
    with measure.workspace() as folder:
        for number in range(rounds):
            cold, restarts, events = _run(folder, job, kills)
            times["cold"].append(cold)
            times["paceline"] += restarts
            for event in events:
                if event["event"] == "start-times":
                    stages["cold" if event["generation"] == 1 else "paceline"].append(event)
            after = ", ".join(f"{value:.2f} s" for value in restarts)
            measure.progress(f"round {number + 1}: cold {cold:.2f} s, after a kill {after}")
    _report(program, machine_info, times, stages)


def _report(
    program: str, machine_info: dict[str, Any], times: dict[str, list[float]], stages: dict[str, list[Event]]
) -> None:
    ours, theirs = measure.median(times["paceline"]), measure.median(times["cold"])
    ratio = measure.ratio(ours, theirs)
    medians = {side: _medians(events) for side, events in stages.items()}
    rows = [
        [side, measure.seconds(measure.median(values)), measure.spread(values), str(len(values)),
         *(measure.seconds(medians[side].get(stage)) for stage in STAGES)]
        for side, values in times.items()
    ]  # fmt: skip
    measure.table(["side", "median", "range", "starts", *(stage.removesuffix("_s") for stage in STAGES)], rows)
    measure.say(f"ratio {ratio} (at most {GOAL}); stages: medians of all tasks, in seconds after the task's start\n")
    measure.finish(
        {
            "bench": "restart", "program": program, "machine": machine_info, "peer": "cold", "paceline_s": ours,
            "peer_s": theirs, "ratio": ratio, "goal_ratio": GOAL, "reached": ratio is not None and ratio <= GOAL,
            "paceline_all_s": times["paceline"], "peer_all_s": times["cold"], "stages": medians,
        }
    )  # fmt: skip


def _medians(events: list[Event]) -> dict[str, float]:
    values = {stage: [event[stage] for event in events if stage in event] for stage in STAGES}
    return {stage: measure.median(each) for stage, each in values.items() if each}


def _run(parent: Path, job: Path, kills: int) -> tuple[float, list[float], list[Event]]:
    """Seconds of the cold start, seconds of each restart, and all events of the run."""
    with measure.fresh(parent) as folder:
        process = _start(folder, job)
        first = _wait(folder, process, lambda events: _first_steps(events, 1), START_LIMIT, "the first steps")
        began = min(_at(event) for event in _of(_events(folder), "task-started", 1))  # without that of ingest
        restarts = []
        for number in range(kills):
            _wait(folder, process, _is_ready, START_LIMIT, "spares and a committed snapshot")
            restarts.append(_kill(folder, process, number))
        return max(first.values()) - began, restarts, _events(folder)


def _start(folder: Path, job: Path) -> subprocess.Popen[bytes]:
    command = [*measure.PACELINE, "run", str(job), "--set", f"ingest.to={folder / 'prepared'}"]
    return measure.spawn(command, folder, measure.environment(2, {"PACELINE_HOME": str(folder / "home")}))


def _kill(folder: Path, process: subprocess.Popen[bytes], number: int) -> float:
    events = _events(folder)
    generation = max(event["generation"] for event in events)
    pids = [event["pid"] for event in _of(events, "task-started", generation)]
    before = measure.now()
    os.kill(pids[-1 - number % len(pids)], signal.SIGKILL)
    stepped = _wait(
        folder, process, lambda events: _first_steps(events, generation + 1), RESTART_LIMIT, "the next steps"
    )
    return max(stepped.values()) - before


def _wait(folder: Path, process: subprocess.Popen[bytes], check: Any, limit: float, what: str) -> Any:
    def result() -> Any:
        if process.poll() is not None:
            raise measure.MeasurementFailed(f"the run ended with {process.returncode} before {what}")
        return check(_events(folder))

    return measure.wait_until(result, limit, what, every=EVERY)


def _first_steps(events: list[Event], generation: int) -> dict[str, float] | None:
    """task -> when it did its first step of the generation, once all have."""
    tasks = next((event["tasks"] for event in _of(events, "generation-formed", generation)), None)
    first: dict[str, float] = {}
    for event in _of(events, "step", generation):
        first.setdefault(event["task"], _at(event))
    return first if tasks is not None and len(first) == len(tasks) else None


def _is_ready(events: list[Event]) -> bool:
    kinds = [event["event"] for event in events]
    hosts = {event["host"] for event in events if event["event"] == "spare-ready"}
    return len(hosts) == len(events[0]["tasks"]) and "committed" in kinds


def _of(events: list[Event], kind: str, generation: int) -> list[Event]:
    return [event for event in events if event["event"] == kind and event["generation"] == generation]


def _at(event: Event) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def _events(folder: Path) -> list[Event]:
    lines = [line for path in folder.glob("home/runs/*/events.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]
