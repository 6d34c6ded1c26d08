"""Submit to all pods running, on simulated nodes: `paceline run --on kubernetes` against a bare Indexed Job."""

from __future__ import annotations

import datetime
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import clusters
import measure
from clusters import Place, Watch

SIZES = (10, 100, 1000)
ROUNDS = {10: 5, 100: 5, 1000: 2}
LIMIT = 90.0
GOAL = 1.1  # of the bare Job's time
GOAL_MB = 150.0
SETTLED_S = 3.0  # after all pods run, until the peak of the command line's memory counts
SIDES = ("paceline", "bare")


@dataclass(frozen=True)
class Taken:
    """Seconds until all pods ran, by the two clocks."""

    from_start: float  # of the process
    from_request: float  # since the API server received the first that makes something


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, help="of each side and size, instead of 5, and 2 of 1,000 pods")
    parser.add_argument("--pod-start", type=float, default=clusters.POD_START, help="seconds of a simulated pod")
    given = parser.parse_args()
    where = measure.machine("lightkube")
    measure.say(
        f"Until all pods run, on simulated nodes (kwok, {given.pod_start:g} s a pod) beside a real control plane,"
    )
    measure.say(
        "as `kubectl get pods --watch` tells. paceline: `run --on kubernetes --detach`, with its captain's pod;"
    )
    measure.say("bare: one Indexed Job with the same pods, by `kubectl apply`. Interleaved. Compared: since the API")
    measure.say("server has received the first request that makes something, by its audit log. Beside it: since the")
    measure.say("process was started.")
    measure.say(f"On: {where}\n")
    taken: dict[tuple[int, str], list[Taken]] = {(size, side): [] for size in given.sizes for side in SIDES}
    memory: dict[int, float] = {}
    with clusters.place(nodes=1, pod_start=given.pod_start) as here:
        for side in SIDES:
            _once(here, side, min(given.sizes))  # files into the page cache; not counted
        for size in given.sizes:
            for number in range(given.rounds or ROUNDS.get(size, 2)):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    found = _once(here, side, size)
                    taken[size, side].append(found)
                    measure.progress(
                        f"{size} pods, round {number + 1} {side}: {found.from_start:.3f} s, "
                        f"{found.from_request:.3f} s since the first request"
                    )
            memory[size] = _memory(here, size)
            measure.progress(f"{size} pods, followed: {memory[size]:.0f} MB at most")
    _report(where, given.sizes, given.pod_start, taken, memory)


def _report(
    where: dict[str, Any],
    sizes: list[int],
    pod_start: float,
    taken: dict[tuple[int, str], list[Taken]],
    memory: dict[int, float],
) -> None:
    rows, results = [], {}
    for size in sizes:
        asked = {side: [each.from_request for each in taken[size, side]] for side in SIDES}
        begun = {side: [each.from_start for each in taken[size, side]] for side in SIDES}
        ours, theirs = (measure.median(asked[side]) for side in SIDES)
        ours_begun, theirs_begun = (measure.median(begun[side]) for side in SIDES)
        share, share_begun = measure.ratio(ours, theirs), measure.ratio(ours_begun, theirs_begun)
        results[size] = {
            "paceline_s": ours, "bare_s": theirs, "ratio": share, "goal_ratio": GOAL,
            "paceline_from_start_s": ours_begun, "bare_from_start_s": theirs_begun, "ratio_from_start": share_begun,
            "cli_peak_mb": round(memory[size], 1), "goal_mb": GOAL_MB,
            "reached": share is not None and share <= GOAL and memory[size] < GOAL_MB,
            "paceline_all_s": asked["paceline"], "bare_all_s": asked["bare"],
        }  # fmt: skip
        rows.append(
            [str(size), measure.seconds(ours), measure.spread(asked["paceline"]), measure.seconds(theirs),
             measure.spread(asked["bare"]), str(share), measure.seconds(ours_begun), measure.seconds(theirs_begun),
             str(share_begun), f"{memory[size]:.0f} MB"]
        )  # fmt: skip
    title = ["pods", "paceline", "(range)", "bare", "(range)", "ratio", "since start", "bare", "ratio", "following"]
    measure.table(title, rows)
    measure.say(f"ratio at most {GOAL}; the command line that follows has at most {GOAL_MB:.0f} MB\n")
    measure.finish({"bench": "cluster_scale", "machine": where, "pod_start_s": pod_start, "results": results})


def _once(here: Place, side: str, pods: int) -> Taken:
    job = clusters.write_loop(here.folder, pods)
    bare = _bare(here, job)
    asked = len(here.cluster.requests(clusters.USER))
    with Watch(here) as watch:
        before = measure.now()
        if side == "paceline":
            process = clusters.submit(here, job, "--detach")
        else:
            process = measure.spawn(here.kubectl("apply", "-f", str(bare)), here.folder, here.environment())
        after = watch.all_running(pods + (side == "paceline"), LIMIT, process)
        process.wait(LIMIT)
    requests = here.cluster.requests(clusters.USER)[asked:]
    first = next(each for each in requests if each["verb"] == "create")
    clusters.clear(here)
    return Taken(after - before, after - _at(first))


def _at(request: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(request["requestReceivedTimestamp"]).timestamp()


def _bare(here: Place, job: Path) -> Path:
    """The workers' Job of such a run, with the same pods; what they mount is not there, and nobody looks for it."""
    command = [*measure.PACELINE, "render", str(job), "--run", "bare"]
    rendered = subprocess.run(command, env=here.environment(), check=True, capture_output=True, text=True).stdout
    objects = YAML(typ="safe").load_all(rendered)
    path = here.folder / "bare.json"
    path.write_text(json.dumps(next(each for each in objects if each["metadata"]["name"] == "bare-worker")))
    return path


def _memory(here: Place, pods: int) -> float:
    """At most, of a command line that submits and follows."""
    job = clusters.write_loop(here.folder, pods)
    with Watch(here) as watch:
        process = clusters.submit(here, job)
        after = watch.all_running(pods + 1, LIMIT, process)
        measure.wait_until(lambda: measure.now() > after + SETTLED_S, LIMIT, "a quiet command line")
        if process.poll() is not None:
            raise measure.TookTooLong("the command line that follows has ended")
        found = clusters.peak_memory(process.pid)
    clusters.clear(here, process)
    return found


if __name__ == "__main__":
    main()
