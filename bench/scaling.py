"""Steps a second of two examples with 1 and 2 workers under `paceline run`, against the same program by hand."""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

sys.path.append(str(measure.SOURCE))

from paceline.runtime import tfrecord

GOAL = 0.01
LIMIT = 180.0
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
    first: int  # the step that counting begins after: until then functions are traced, and the rest of the run starts


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
    return ["--data", str(folder / "prepared"), *size, *batch, "--epochs", "1", "--snapshot-every", NEVER]


def _resnet(folder: Path, workers: int) -> list[str]:
    size = ["--depth", "8", "--epochs", "3", "--no-flip", "--cuts", "2"]
    return ["--data", str(folder / "digits"), *size, "--evaluate", "side-car", "--every", NEVER]


EXAMPLES = (
    Example("translate", "multi-worker", _words, _translate, lambda workers: {"worker": workers}, 50),
    Example(
        "resnet-ps", "parameter-server", _digits, _resnet, lambda workers: {"chief": 1, "ps": 1, "worker": workers}, 50
    ),
)


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of sessions")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--examples", nargs="+", default=[each.name for each in EXAMPLES])
    given = parser.parse_args()
    where = measure.machine("tensorflow-cpu", "keras")
    measure.say(
        "Steps a second, from the times of the losses in TensorBoard's files; the start is not counted. The same"
    )
    measure.say(
        "program, data, processes and thread counts. paceline: `paceline run`; by hand: processes with TF_CONFIG,"
    )
    measure.say(
        "where reports and snapshots do nothing. A step has as many examples with 1 worker as with 2. Interleaved."
    )
    measure.say(f"On: {where}\n")
    found = []
    with measure.workspace() as folder:
        for example in (each for each in EXAMPLES if each.name in given.examples):
            example.prepare(folder, measure.environment(1))
            found += [_compare(example, folder, workers, given.rounds) for workers in given.workers]
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


def _compare(example: Example, folder: Path, workers: int, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            rates[side].append(_session(example, folder, workers, side))
        told = ", ".join(f"{side} {rates[side][-1]:.2f}" for side in SIDES)
        measure.progress(f"{example.name}, workers {workers}, round {number + 1}: steps a second: {told}")
    pairs = [other / ours - 1 for ours, other in zip(rates["paceline"], rates["by hand"], strict=True)]
    # Half the distance between the quartiles, over the root of the number of pairs: what the median may be off by.
    quarters = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [0.0, 0.0, 0.0]
    return {
        "example": example.name, "workers": workers,
        **{side: round(statistics.median(rates[side]), 3) for side in SIDES},
        "slower": round(statistics.median(pairs), 5),
        "noise": round(1.25 * (quarters[2] - quarters[0]) / 1.35 / len(pairs) ** 0.5, 5),
        "pairs": [round(pair, 5) for pair in pairs],
    }  # fmt: skip


def _session(example: Example, data: Path, workers: int, side: str) -> float:
    """Steps a second of one training."""
    roles = example.roles(workers)
    program = ["train.py", *example.options(data, workers)]
    with measure.fresh(data) as folder:
        env = measure.environment(workers, {"PACELINE_HOME": str(folder / "home")})
        if side == "paceline":
            job = _job(example, folder, program, roles)
            leader = measure.spawn([*measure.PACELINE, "run", str(job)], folder, env)
        else:
            leader, *_ = _by_hand(example, folder, program, roles, env)
        measure.wait_until(lambda: leader.poll() is not None, LIMIT, f"the end of {example.name}, {side}")
        if leader.returncode:
            measure.show_output(folder)
            raise SystemExit(f"{example.name} failed: {side}")
        rate = _rate(folder, example.first)
        shutil.rmtree(folder, ignore_errors=True)
    return rate


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


def _rate(folder: Path, first: int) -> float:
    """From the first loss at or after that step to the last one."""
    times: dict[int, float] = {}
    for path in folder.rglob("*.tfevents.*"):
        with path.open("rb") as file:
            for _, record in tfrecord.records(file):
                step, tags = tfrecord.summary_of(record) or (0, ())
                if "loss" in tags:
                    assert record[0] == 9, "the time is the first field of an event"
                    (times[step],) = struct.unpack_from("<d", record, 1)
    counted = sorted(step for step in times if step >= first)
    if len(counted) < 2:
        measure.show_output(folder)
        raise SystemExit(f"there are no times of steps after {first}: {len(times)} in all")
    return (counted[-1] - counted[0]) / (times[counted[-1]] - times[counted[0]])


def _python(folder: Path, env: dict[str, str], example: str, *words: str) -> None:
    """A script of an example."""
    code = measure.ROOT / "examples" / example
    made = subprocess.run([sys.executable, *words], cwd=code, env=env, capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{made.stderr[-2000:]}")


if __name__ == "__main__":
    main()
