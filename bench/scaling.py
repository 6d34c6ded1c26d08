"""Steps a second of two examples with 1 and 2 workers under `paceline run`, against the same program by hand."""

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

from paceline.runtime import tfrecord

GOAL = 0.01
LIMIT = 900.0
TURN = 2.0  # seconds that one side runs while the other one stands still
PARTS = 12  # of what is counted, each compared by itself: how far they differ is what the result may be off by
SIDES = ("paceline", "by hand")
NEVER = "1000000"  # steps between snapshots: by hand there are none, and snapshot_stall.py has what they cost


@dataclass(frozen=True)
class Example:
    """One that writes its loss to TensorBoard's files: there are the times of its steps, without a change to it."""

    name: str
    strategy: str
    prepare: Callable[[Path, dict[str, str]], None]  # its own data, made by its own script
    options: Callable[[Path, int], list[str]]  # of its program, for a folder of data and a number of workers
    roles: Callable[[int], dict[str, int]]
    first: int  # the step that counting begins after: until then functions are traced


def _words(folder: Path, env: dict[str, str]) -> None:
    _python(folder, env, "translate", "cmudict_pairs.py", str(folder / "all.tsv"), "--longest", "6")
    lines = (folder / "all.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "pairs.tsv").write_text("".join(lines[:: len(lines) // 16_000]), encoding="utf-8")
    _python(folder, env, "translate", "prepare.py", str(folder / "pairs.tsv"), "--to", str(folder / "prepared"))


def _digits(folder: Path, env: dict[str, str]) -> None:
    _python(folder, env, "resnet-ps", "digits_as_cifar.py", str(folder / "digits"))


def _translate(folder: Path, workers: int) -> list[str]:
    size = ["--depth", "2", "--width", "64", "--inner", "128", "--heads", "4", "--warm-up", "400"]
    batch = ["--batch", str(64 // workers)]  # of each worker: a step has as many pairs with any number of them
    return ["--data", str(folder / "prepared"), *size, *batch, "--epochs", "12", "--snapshot-every", NEVER]


def _resnet(folder: Path, workers: int) -> list[str]:
    size = ["--depth", "8", "--epochs", "20", "--no-flip", "--cuts", "15"]
    return ["--data", str(folder / "digits"), *size, "--evaluate", "side-car", "--every", NEVER]


EXAMPLES = (
    Example("translate", "multi-worker", _words, _translate, lambda workers: {"worker": workers}, 50),
    Example(
        "resnet-ps", "parameter-server", _digits, _resnet, lambda workers: {"chief": 1, "ps": 1, "worker": workers}, 50
    ),
)


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--examples", nargs="+", default=[each.name for each in EXAMPLES])
    given = parser.parse_args()
    where = measure.machine("tensorflow-cpu", "keras")
    measure.say("Steps a second, from the times of the losses in TensorBoard's files, once all is started. The same")
    measure.say(
        "program, data, processes and thread counts. paceline: `paceline run`; by hand: processes with TF_CONFIG,"
    )
    measure.say(f"where reports and snapshots do nothing. Both train at the same time, by turns of {TURN:g} s.")
    measure.say(f"On: {where}\n")
    found = []
    with measure.workspace() as folder:
        for example in (each for each in EXAMPLES if each.name in given.examples):
            example.prepare(folder, measure.environment(1))
            found += [_compare(example, folder, workers) for workers in given.workers]
    measure.table(
        ["example", "workers", "paceline", "by hand", "slower by", "give or take"],
        [
            [each["example"], str(each["workers"]), *(f"{each[side]:.2f}/s" for side in SIDES),
             f"{each['slower']:+.2%}", f"{each['noise']:.2%}"]
            for each in found
        ],
    )  # fmt: skip
    measure.say(f"at most:  {GOAL:+.2%}\n")
    measure.finish(
        {"bench": "scaling", "machine": where, "goal": GOAL, "found": found,
         "reached": all(each["slower"] <= GOAL for each in found)}
    )  # fmt: skip


def _compare(example: Example, data: Path, workers: int) -> dict[str, Any]:
    with measure.fresh(data) as folder:
        turns = _by_turns(example, data, folder, workers)
        losses = {side: _losses(folder / side) for side in SIDES}
        started = [at for times in losses.values() for step, at in times if step == _after(times, example.first)]
        begin = max(*started, *_spares_ready(folder / "paceline"))
        end = min(times[-1][1] for times in losses.values())
        edges = [begin + (end - begin) * part / PARTS for part in range(PARTS + 1)]
        done = {side: [_at(edge, losses[side], turns[side]) for edge in edges] for side in SIDES}
    rates = {side: _rate(done[side][0], done[side][-1]) for side in SIDES}
    between = {side: [_rate(*pair) for pair in pairwise(done[side])] for side in SIDES}
    parts = [theirs / ours - 1 for ours, theirs in zip(*(between[side] for side in SIDES), strict=True)]
    quarters = statistics.quantiles(parts, n=4)
    found = {
        "example": example.name, "workers": workers, **{side: round(rates[side], 3) for side in SIDES},
        "slower": round(rates["by hand"] / rates["paceline"] - 1, 5),
        # Half the distance between the quartiles, over the root of their number: what the mean may be off by.
        "noise": round((quarters[2] - quarters[0]) / 1.35 / PARTS**0.5, 5),
        "parts": [round(part, 5) for part in parts],
    }  # fmt: skip
    measure.progress(f"{example.name}, workers {workers}: {found['slower']:+.2%}, give or take {found['noise']:.2%}")
    return found


def _by_turns(example: Example, data: Path, folder: Path, workers: int) -> dict[str, list[tuple[float, float]]]:
    """Both sides train to the end, each while the other one stands still: from when to when each has run."""
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
            raise measure.TookTooLong(f"{example.name}: not within {LIMIT:g} s")
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
    """To all processes of a side, also to those that were started meanwhile."""
    seen: set[int] = set()
    mark = f"BENCH_SIDE={side}".encode()
    while more := {pid for pid in measure.descendants(os.getpid()) if mark in measure.environment_of(pid)} - seen:
        for pid in more:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        seen |= more


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
    """The first is the one that ends by itself; what serves is ended with the session."""
    names = [(role, index) for role, count in roles.items() for index in range(count)]
    ports = iter(_ports(len(names)))
    cluster = {role: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in roles.items()}
    started = []
    for role, index in names:
        more = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
            "PACELINE_TENSORBOARD_DIR": str(folder / "tensorboard"),
        }
        if example.strategy == "multi-worker":  # its share of the data is by these, whoever sets them
            more |= {"PACELINE_RANK": str(index), "PACELINE_WORLD_SIZE": str(roles["worker"])}
        code = measure.ROOT / "examples" / example.name
        words = [sys.executable, str(code / program[0]), *program[1:]]
        started.append(measure.spawn(words, folder, {**env, **more}))
    return started


def _ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


Times = list[tuple[int, float]]


def _losses(folder: Path) -> Times:
    """Steps, and when each was told."""
    times: dict[int, float] = {}
    for path in folder.rglob("*.tfevents.*"):
        with path.open("rb") as file:
            for _, record in tfrecord.records(file):
                step, tags = tfrecord.summary_of(record) or (0, ())
                if "loss" in tags:
                    assert record[0] == 9, "the time is the first field of an event"
                    (times[step],) = struct.unpack_from("<d", record, 1)
    return sorted(times.items())


def _after(times: Times, first: int) -> int:
    later = [step for step, _ in times if step >= first]
    if len(later) < PARTS:
        raise SystemExit(f"there are too few times of steps after {first}: {len(later)}")
    return later[0]


def _spares_ready(folder: Path) -> list[float]:
    """When: until then, processes that no training by hand has are still starting."""
    events = [json.loads(line) for path in folder.rglob("events.jsonl") for line in path.read_text().splitlines()]
    return [datetime.fromisoformat(each["at"]).timestamp() for each in events if each["event"] == "spare-ready"]


def _at(when: float, times: Times, turns: list[tuple[float, float]]) -> tuple[float, float]:
    """How long a side had run by then, and how many steps, with parts of one, it had done."""
    ran = [_ran(at, turns) for _, at in times]
    now = _ran(when, turns)
    later = min(max(1, bisect.bisect_left(ran, now)), len(ran) - 1)
    before, after = ran[later - 1], ran[later]
    return now, times[later - 1][0] + (times[later][0] - times[later - 1][0]) * (now - before) / (after - before)


def _ran(when: float, turns: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(when, ended) - began) for began, ended in turns)


def _rate(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _python(folder: Path, env: dict[str, str], example: str, *words: str) -> None:
    """A script of an example."""
    code = measure.ROOT / "examples" / example
    made = subprocess.run([sys.executable, *words], cwd=code, env=env, capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{made.stderr[-2000:]}")


if __name__ == "__main__":
    main()
