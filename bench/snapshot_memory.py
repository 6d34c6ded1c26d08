"""Memory that saving needs: of a program that saves snapshots while it trains, and of the porter that sends them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carrying
import measure

GOAL = 1.1  # as a share of the state's size
LIMIT = 200.0
FRAMEWORKS = ("torch", "tensorflow", "jax")
ARRAYS = (1, 4, 200)
FILES = 4


@dataclass(frozen=True)
class Measurement:
    process: str
    case: str
    peak_before: int  # bytes: the peak without snapshots
    peak: int
    state: int

    @property
    def share(self) -> float:
        return (self.peak - self.peak_before) / self.state


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each kind; the worst one is reported")
    parser.add_argument("--mib", type=int, default=400, help="MiB of state")
    args = parser.parse_args()
    machine_info = measure.machine("torch", "tensorflow-cpu", "jax", "obstore")
    measure.say(f"Peak resident memory of a process with {args.mib} MiB of state, above the peak of the same process")
    measure.say(
        "before, as a share of the state; three snapshots each. Programs change all of the state in every step,"
    )
    measure.say("before and while snapshots are written. The porter sends 4 files to a folder or to a bucket.")
    measure.say(f"On: {machine_info}\n")
    measurements: list[Measurement] = []
    with measure.workspace() as folder:
        for number in range(args.rounds):
            for framework in FRAMEWORKS:
                measurements += [_program(folder, framework, arrays, args.mib) for arrays in ARRAYS]
            measurements += _porters(folder, args.mib)
            measure.progress(
                f"round {number + 1}: {', '.join(f'{each.process} {each.share:.3f}' for each in measurements)}"
            )
    _report(machine_info, measurements, args.mib)


def _program(parent: Path, framework: str, arrays: int, mib: int) -> Measurement:
    with measure.fresh(parent) as folder:
        program = [str(measure.PROGRAMS / "saving.py"), framework, "--mib", str(mib), "--arrays", str(arrays)]
        env = measure.environment(1, {"PACELINE_SNAPSHOT_DIR": str(folder / "saved")})
        result = subprocess.run(
            [sys.executable, *program], env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        shutil.rmtree(folder / "saved", ignore_errors=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(program)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    peaks = json.loads(result.stdout.splitlines()[-1])
    return Measurement(framework, f"state of {arrays} arrays", peaks["without"], peaks["with"], peaks["state"])


def _porters(folder: Path, mib: int) -> list[Measurement]:
    state = folder / "state"
    state.mkdir()
    for number in range(FILES):
        (state / f"part-{number}").write_bytes(os.urandom((mib << 20) // FILES))
    env = measure.environment(1)
    measurements = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, state)
        target = folder / "place"
        stack.callback(shutil.rmtree, target)
        measurements.append(_porter("folder", str(target), env, state, mib))
        if not carrying.no_bucket():
            url, options = stack.enter_context(carrying.bucket(folder / "s3"))
            measurements.append(_porter("bucket", url, env | options, state, mib))
    return measurements


def _porter(kind: str, location: str, env: dict[str, str], state: Path, mib: int) -> Measurement:
    with carrying.porter(location, env) as porter:

        def send() -> None:
            for step in (1, 2, 3):
                porter.commit(porter.send(state, step), step)
                porter.delete(step)

        before = _peak(porter.process.pid, lambda: None)
        return Measurement("porter", f"to a {kind}", before, _peak(porter.process.pid, send), mib << 20)


def _peak(pid: int, work: Callable[[], Any]) -> int:
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    work()
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) * 1024


def _report(machine_info: dict[str, Any], measurements: list[Measurement], mib: int) -> None:
    worst: dict[tuple[str, str], Measurement] = {}
    for each in measurements:
        key = each.process, each.case
        worst[key] = max(worst.get(key, each), each, key=lambda measurement: measurement.share)
    rows = [
        [each.process, each.case, f"{each.peak_before >> 20} MiB", f"{each.peak >> 20} MiB", f"{each.share:.3f}"]
        for each in worst.values()
    ]
    measure.table(["process", "case", "peak before", "peak", "increase / state"], rows)
    measure.say(f"at most {GOAL}\n")
    measure.finish(
        {
            "bench": "snapshot_memory", "machine": machine_info, "state_mib": mib, "goal": GOAL,
            "reached": all(each.share <= GOAL for each in measurements),
            "results": [
                {"process": each.process, "what": each.case, "before": each.peak_before, "peak": each.peak,
                 "share": round(each.share, 4)}
                for each in worst.values()
            ],
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
