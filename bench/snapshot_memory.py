"""Memory that saving takes: of the program that takes snapshots while it trains, and of the porter that sends them."""

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

GOAL = 1.1  # of the state's size
LIMIT = 200.0
FRAMEWORKS = ("torch", "tensorflow", "jax")
ARRAYS = (1, 4, 200)
FILES = 4


@dataclass(frozen=True)
class Found:
    who: str
    what: str
    without: int  # bytes: the peak before
    peak: int
    state: int

    @property
    def share(self) -> float:
        return (self.peak - self.without) / self.state


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each kind; the worst counts")
    parser.add_argument("--mib", type=int, default=400, help="of state")
    given = parser.parse_args()
    where = measure.machine("torch", "tensorflow-cpu", "jax", "obstore")
    measure.say(f"Peak resident memory of a process with {given.mib} MiB of state, above the peak of the same process")
    measure.say(
        "before, as a share of the state; three snapshots each. Programs change all of the state at every step,"
    )
    measure.say("before and while snapshots are written. The porter sends 4 files to a folder or to a bucket.")
    measure.say(f"On: {where}\n")
    found: list[Found] = []
    with measure.workspace() as folder:
        for number in range(given.rounds):
            for framework in FRAMEWORKS:
                found += [_program(folder, framework, arrays, given.mib) for arrays in ARRAYS]
            found += _porters(folder, given.mib)
            measure.progress(f"round {number + 1}: {', '.join(f'{each.who} {each.share:.3f}' for each in found)}")
    _report(where, found, given.mib)


def _program(parent: Path, framework: str, arrays: int, mib: int) -> Found:
    with measure.fresh(parent) as folder:
        program = [str(measure.PROGRAMS / "saving.py"), framework, "--mib", str(mib), "--arrays", str(arrays)]
        env = measure.environment(1, {"PACELINE_SNAPSHOT_DIR": str(folder / "saved")})
        done = subprocess.run(
            [sys.executable, *program], env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        shutil.rmtree(folder / "saved", ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(program)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    words = json.loads(done.stdout.splitlines()[-1])
    return Found(framework, f"state of {arrays} arrays", words["without"], words["with"], words["state"])


def _porters(folder: Path, mib: int) -> list[Found]:
    state = folder / "state"
    state.mkdir()
    for number in range(FILES):
        (state / f"part-{number}").write_bytes(os.urandom((mib << 20) // FILES))
    env = measure.environment(1)
    found = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, state)
        place = folder / "place"
        stack.callback(shutil.rmtree, place)
        found.append(_porter("folder", str(place), env, state, mib))
        if not carrying.no_bucket():
            url, options = stack.enter_context(carrying.bucket(folder / "s3"))
            found.append(_porter("bucket", url, env | options, state, mib))
    return found


def _porter(what: str, place: str, env: dict[str, str], state: Path, mib: int) -> Found:
    with carrying.porter(place, env) as porter:

        def send() -> None:
            for step in (1, 2, 3):
                porter.commit(porter.send(state, step), step)
                porter.delete(step)

        before = _peak(porter.process.pid, lambda: None)
        return Found("porter", f"to a {what}", before, _peak(porter.process.pid, send), mib << 20)


def _peak(pid: int, work: Callable[[], Any]) -> int:
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    work()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def _report(where: dict[str, Any], found: list[Found], mib: int) -> None:
    worst: dict[tuple[str, str], Found] = {}
    for each in found:
        key = each.who, each.what
        worst[key] = max(worst.get(key, each), each, key=lambda one: one.share)
    rows = [
        [each.who, each.what, f"{each.without >> 20} MiB", f"{each.peak >> 20} MiB", f"{each.share:.3f}"]
        for each in worst.values()
    ]
    measure.table(["process", "", "peak before", "peak", "more, of the state"], rows)
    measure.say(f"at most {GOAL}\n")
    measure.finish(
        {
            "bench": "snapshot_memory", "machine": where, "state_mib": mib, "goal": GOAL,
            "reached": all(each.share <= GOAL for each in found),
            "results": [
                {"process": each.who, "what": each.what, "before": each.without, "peak": each.peak,
                 "share": round(each.share, 4)}
                for each in worst.values()
            ],
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
