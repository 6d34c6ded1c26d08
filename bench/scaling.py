"""Steps per second of two examples with 1 and 2 workers: `paceline run` compared with the same program by hand."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure

sys.path.append(str(measure.SOURCE))

from paceline.storage import tfrecord

GOAL = 0.01
LIMIT = 900.0
TURN = 2.0  # seconds that one side runs while the other one is stopped
PARTS = 12  # of the measured time, compared separately: the uncertainty is derived from their differences
SIDES = ("paceline", "by hand")
NEVER = "1000000"  # steps between snapshots: there are none by hand, and snapshot_stall.py measures their cost


@dataclass(frozen=True)
class Example:
    """An example that writes its loss to TensorBoard's files, which contain the times of its steps."""

    name: str
    strategy: str
    prepare: Callable[[Path, dict[str, str]], None]  # creates its data with its own script
    options: Callable[[Path, int], list[str]]  # options of its program, for a data folder and a number of workers
    roles: Callable[[int], dict[str, int]]
    first: int  # the step after which counting begins: functions are traced before


def _prepare_words(folder: Path, env: dict[str, str]) -> None:
    _python(folder, env, "translate", "cmudict_pairs.py", str(folder / "all.tsv"), "--longest", "6")
    lines = (folder / "all.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "pairs.tsv").write_text("".join(lines[:: len(lines) // 16_000]), encoding="utf-8")
    _python(folder, env, "translate", "prepare.py", str(folder / "pairs.tsv"), "--to", str(folder / "prepared"))


def _prepare_digits(folder: Path, env: dict[str, str]) -> None:
    _python(folder, env, "resnet-ps", "digits_as_cifar.py", str(folder / "digits"))


def _translate_options(folder: Path, workers: int) -> list[str]:
    size = ["--depth", "2", "--width", "64", "--inner", "128", "--heads", "4", "--warm-up", "400"]
    batch = ["--batch", str(64 // workers)]  # per worker: a step has the same number of pairs for any number of workers
    return ["--data", str(folder / "prepared"), *size, *batch, "--epochs", "12", "--snapshot-every", NEVER]


def _resnet_options(folder: Path, workers: int) -> list[str]:
    size = ["--depth", "8", "--epochs", "20", "--no-flip", "--cuts", "15"]
    return ["--data", str(folder / "digits"), *size, "--evaluate", "side-car", "--every", NEVER]


EXAMPLES = (
    Example("translate", "multi-worker", _prepare_words, _translate_options, lambda workers: {"worker": workers}, 50),
    Example(
        "resnet-ps",
        "parameter-server",
        _prepare_digits,
        _resnet_options,
        lambda workers: {"chief": 1, "ps": 1, "worker": workers},
        50,
    ),
)


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--examples", nargs="+", default=[each.name for each in EXAMPLES])
    args = parser.parse_args()
    machine_info = measure.machine("tensorflow-cpu", "keras")
    measure.say(
        "Steps per second, from the times of the losses in TensorBoard's files, once all have started. The same"
    )
    measure.say(
        "program, data, processes and thread counts. paceline: `paceline run`; by hand: processes with TF_CONFIG,"
    )
    measure.say(f"where reports and snapshots do nothing. Both train at the same time, in turns of {TURN:g} s.")
    measure.say(f"On: {machine_info}\n")
    results = []
    with measure.workspace() as folder:
        for example in (each for each in EXAMPLES if each.name in args.examples):
            example.prepare(folder, measure.environment(1))
            results += [_compare(example, folder, workers) for workers in args.workers]
    measure.table(
        ["example", "workers", "paceline", "by hand", "slower by", "uncertainty"],
        [
            [each["example"], str(each["workers"]), *(f"{each[side]:.2f}/s" for side in SIDES),
             f"{each['slower']:+.2%}", f"{each['noise']:.2%}"]
            for each in results
        ],
    )  # fmt: skip
    measure.say(f"at most:  {GOAL:+.2%}\n")
    measure.finish(
        {"bench": "scaling", "machine": machine_info, "goal": GOAL, "results": results,
         "reached": all(each["slower"] <= GOAL for each in results)}
    )  # fmt: skip


def _compare(example: Example, data: Path, workers: int) -> dict[str, Any]:
    with measure.fresh(data) as folder:
        turns = _by_turns(example, data, folder, workers)
        losses = {side: _losses(folder / side) for side in SIDES}
        started = [
            at for times in losses.values() for step, at in times if step == _first_step_after(times, example.first)
        ]
        begin = max(*started, *_spares_ready(folder / "paceline"))
        end = min(times[-1][1] for times in losses.values())
        edges = [begin + (end - begin) * part / PARTS for part in range(PARTS + 1)]
        progress = {side: [_progress_at(edge, losses[side], turns[side]) for edge in edges] for side in SIDES}
    rates = {side: _rate(progress[side][0], progress[side][-1]) for side in SIDES}
    part_rates = {side: [_rate(*pair) for pair in pairwise(progress[side])] for side in SIDES}
    parts = [theirs / ours - 1 for ours, theirs in zip(*(part_rates[side] for side in SIDES), strict=True)]
    quartiles = statistics.quantiles(parts, n=4)
    result = {
        "example": example.name, "workers": workers, **{side: round(rates[side], 3) for side in SIDES},
        "slower": round(rates["by hand"] / rates["paceline"] - 1, 5),
        # The standard error of the mean, estimated from the distance between the quartiles.
        "noise": round((quartiles[2] - quartiles[0]) / 1.35 / PARTS**0.5, 5),
        "parts": [round(part, 5) for part in parts],
    }  # fmt: skip
    measure.progress(f"{example.name}, workers {workers}: {result['slower']:+.2%}, ±{result['noise']:.2%}")
    return result


def _by_turns(example: Example, data: Path, folder: Path, workers: int) -> dict[str, list[tuple[float, float]]]:
    """Train both sides to the end, each while the other one is stopped; the times in which each side has run."""
    roles = example.roles(workers)
    program = ["train.py", *example.options(data, workers)]
    leaders = {}
    for side in SIDES:
        (folder / side).mkdir()
        env = measure.environment(workers, {"PACELINE_HOME": str(folder / side / "home"), "BENCH_SIDE": side})
        if side == "paceline":
            job = _job(example, folder / side, program, roles)
            leaders[side] = measure.spawn([*measure.PACELINE, "run", str(job)], folder / side, env)
        else:
            leaders[side], *_ = _by_hand(example, folder / side, program, roles, env)
        _signal(side, signal.SIGSTOP)
    turns: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    until = time.monotonic() + LIMIT
    while running := [side for side in SIDES if leaders[side].poll() is None]:
        if time.monotonic() > until:
            raise measure.MeasurementFailed(f"{example.name}: not within {LIMIT:g} s")
        for side in running:
            began = time.time()
            _signal(side, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                leaders[side].wait(TURN)
            turns[side].append((began, time.time()))
            _signal(side, signal.SIGSTOP)
    for side, leader in leaders.items():
        if leader.returncode:
            measure.show_output(folder)
            raise SystemExit(f"{example.name} failed: {side}")
    return turns


def _signal(side: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a side, including those started in the meantime."""
    signaled: set[int] = set()
    mark = f"BENCH_SIDE={side}".encode()
    while new := {pid for pid in measure.descendants(os.getpid()) if mark in measure.environment_of(pid)} - signaled:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        signaled |= new


def _job(example: Example, folder: Path, program: list[str], roles: dict[str, int]) -> Path:
    job = {
        "name": example.name, "framework": "tensorflow", "strategy": example.strategy, "command": ["python", *program],
        "code": str(measure.ROOT / "examples" / example.name),
        "roles": {role: {"replicas": count} for role, count in roles.items()},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def _by_hand(
    example: Example, folder: Path, program: list[str], roles: dict[str, int], env: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """The first process ends on its own; servers are killed at the end of the session."""
    names = [(role, index) for role, count in roles.items() for index in range(count)]
    ports = iter(_ports(len(names)))
    cluster = {role: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in roles.items()}
    started = []
    for role, index in names:
        variables = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
            "PACELINE_TENSORBOARD_DIR": str(folder / "tensorboard"),
        }
        if example.strategy == "multi-worker":  # the program takes its share of the data from these
            variables |= {"PACELINE_RANK": str(index), "PACELINE_WORLD_SIZE": str(roles["worker"])}
        code = measure.ROOT / "examples" / example.name
        command = [sys.executable, str(code / program[0]), *program[1:]]
        started.append(measure.spawn(command, folder, {**env, **variables}))
    return started


def _ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


Times = list[tuple[int, float]]


def _losses(folder: Path) -> Times:
    """Steps, and when the loss of each was written."""
    times: dict[int, float] = {}
    for path in folder.rglob("*.tfevents.*"):
        with path.open("rb") as file:
            for _, record in tfrecord.records(file):
                step, tags = tfrecord.summary_of(record) or (0, ())
                if "loss" in tags:
                    assert record[0] == 9, "the time is the first field of an event"
                    (times[step],) = struct.unpack_from("<d", record, 1)
    return sorted(times.items())


def _first_step_after(times: Times, first: int) -> int:
    later = [step for step, _ in times if step >= first]
    if len(later) < PARTS:
        raise SystemExit(f"too few steps after step {first}: {len(later)}")
    return later[0]


def _spares_ready(folder: Path) -> list[float]:
    """When the spares were ready: until then, processes are starting that do not exist in training by hand."""
    events = [json.loads(line) for path in folder.rglob("events.jsonl") for line in path.read_text().splitlines()]
    return [datetime.fromisoformat(each["at"]).timestamp() for each in events if each["event"] == "spare-ready"]


def _progress_at(when: float, times: Times, turns: list[tuple[float, float]]) -> tuple[float, float]:
    """How long a side had run at time `when`, and how many steps, with fractions, it had done."""
    ran = [_running_time(at, turns) for _, at in times]
    now = _running_time(when, turns)
    later = min(max(1, bisect.bisect_left(ran, now)), len(ran) - 1)
    before, after = ran[later - 1], ran[later]
    return now, times[later - 1][0] + (times[later][0] - times[later - 1][0]) * (now - before) / (after - before)


def _running_time(when: float, turns: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(when, ended) - began) for began, ended in turns)


def _rate(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _python(folder: Path, env: dict[str, str], example: str, *arguments: str) -> None:
    """Run a script of an example."""
    code = measure.ROOT / "examples" / example
    result = subprocess.run([sys.executable, *arguments], cwd=code, env=env, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{result.stderr[-2000:]}")


if __name__ == "__main__":
    main()
