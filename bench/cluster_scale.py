"""Time from submission to all pods running, on simulated nodes: `paceline run`, compared with a bare Indexed Job."""

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
from clusters import BenchCluster, Watch

SIZES = (10, 100, 1000)
ROUNDS = {10: 5, 100: 5, 1000: 2}
LIMIT = 90.0
GOAL = 1.1  # as a share of the bare Job's time
GOAL_MB = 150.0
SETTLED_S = 3.0  # after all pods run, until the peak memory of the command line is read
SIDES = ("paceline", "bare")


@dataclass(frozen=True)
class Timing:
    """Seconds until all pods ran, from two starting points."""

    from_start: float  # since the process was started
    from_request: float  # since the API server received the first request that creates something


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, help="for each side and size, instead of 5 (2 with 1,000 pods)")
    parser.add_argument(
        "--pod-start", type=float, default=clusters.POD_START, help="seconds until a simulated pod runs"
    )
    args = parser.parse_args()
    machine_info = measure.machine("lightkube")
    measure.say(f"Until all pods run, on simulated nodes (kwok, {args.pod_start:g} s per pod) of a real control plane,")
    measure.say(
        "according to `kubectl get pods --watch`. paceline: `run --on kubernetes --detach`, with its captain's pod;"
    )
    measure.say("bare: one Indexed Job with the same pods, by `kubectl apply`. Interleaved. Compared: time since the")
    measure.say("API server received the first request that creates something, from its audit log. Also shown: time")
    measure.say("since the process was started.")
    measure.say(f"On: {machine_info}\n")
    timings: dict[tuple[int, str], list[Timing]] = {(size, side): [] for size in args.sizes for side in SIDES}
    memory: dict[int, float] = {}
    with clusters.bench_cluster(nodes=1, pod_start=args.pod_start) as bench:
        for side in SIDES:
            _once(bench, side, min(args.sizes))  # fills the page cache; not counted
        for size in args.sizes:
            for number in range(args.rounds or ROUNDS.get(size, 2)):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    timing = _once(bench, side, size)
                    timings[size, side].append(timing)
                    measure.progress(
                        f"{size} pods, round {number + 1} {side}: {timing.from_start:.3f} s, "
                        f"{timing.from_request:.3f} s since the first request"
                    )
            memory[size] = _peak_memory(bench, size)
            measure.progress(f"{size} pods, followed: peak memory {memory[size]:.0f} MB")
    _report(machine_info, args.sizes, args.pod_start, timings, memory)


def _report(
    machine_info: dict[str, Any],
    sizes: list[int],
    pod_start: float,
    timings: dict[tuple[int, str], list[Timing]],
    memory: dict[int, float],
) -> None:
    rows, results = [], {}
    for size in sizes:
        from_request = {side: [each.from_request for each in timings[size, side]] for side in SIDES}
        from_start = {side: [each.from_start for each in timings[size, side]] for side in SIDES}
        ours, theirs = (measure.median(from_request[side]) for side in SIDES)
        ours_from_start, theirs_from_start = (measure.median(from_start[side]) for side in SIDES)
        ratio, ratio_from_start = measure.ratio(ours, theirs), measure.ratio(ours_from_start, theirs_from_start)
        results[size] = {
            "paceline_s": ours, "bare_s": theirs, "ratio": ratio, "goal_ratio": GOAL,
            "paceline_from_start_s": ours_from_start, "bare_from_start_s": theirs_from_start,
            "ratio_from_start": ratio_from_start, "cli_peak_mb": round(memory[size], 1), "goal_mb": GOAL_MB,
            "reached": ratio is not None and ratio <= GOAL and memory[size] < GOAL_MB,
            "paceline_all_s": from_request["paceline"], "bare_all_s": from_request["bare"],
        }  # fmt: skip
        rows.append(
            [str(size), measure.seconds(ours), measure.spread(from_request["paceline"]), measure.seconds(theirs),
             measure.spread(from_request["bare"]), str(ratio), measure.seconds(ours_from_start),
             measure.seconds(theirs_from_start), str(ratio_from_start), f"{memory[size]:.0f} MB"]
        )  # fmt: skip
    title = ["pods", "paceline", "(range)", "bare", "(range)", "ratio", "since start", "bare", "ratio", "following"]
    measure.table(title, rows)
    measure.say(f"ratio at most {GOAL}; peak memory of the command line that follows at most {GOAL_MB:.0f} MB\n")
    measure.finish({"bench": "cluster_scale", "machine": machine_info, "pod_start_s": pod_start, "results": results})


def _once(bench: BenchCluster, side: str, pods: int) -> Timing:
    job = clusters.write_loop(bench.folder, pods)
    bare_job = _write_bare_job(bench, job)
    earlier_requests = len(bench.cluster.requests(clusters.USER))
    with Watch(bench) as watch:
        before = measure.now()
        if side == "paceline":
            process = clusters.submit(bench, job, "--detach")
        else:
            process = measure.spawn(bench.kubectl("apply", "-f", str(bare_job)), bench.folder, bench.environment())
        after = watch.all_running(pods + (side == "paceline"), LIMIT, process)
        process.wait(LIMIT)
    requests = bench.cluster.requests(clusters.USER)[earlier_requests:]
    first = next(each for each in requests if each["verb"] == "create")
    clusters.clear(bench)
    return Timing(after - before, after - _received_at(first))


def _received_at(request: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(request["requestReceivedTimestamp"]).timestamp()


def _write_bare_job(bench: BenchCluster, job: Path) -> Path:
    """The workers' Job of such a run, with the same pods; simulated nodes do not need the objects they mount."""
    command = [*measure.PACELINE, "render", str(job), "--run", "bare"]
    rendered = subprocess.run(command, env=bench.environment(), check=True, capture_output=True, text=True).stdout
    objects = YAML(typ="safe").load_all(rendered)
    path = bench.folder / "bare.json"
    path.write_text(json.dumps(next(each for each in objects if each["metadata"]["name"] == "bare-worker")))
    return path


def _peak_memory(bench: BenchCluster, pods: int) -> float:
    """Peak memory, in MB, of a command line that submits and follows."""
    job = clusters.write_loop(bench.folder, pods)
    with Watch(bench) as watch:
        process = clusters.submit(bench, job)
        after = watch.all_running(pods + 1, LIMIT, process)
        measure.wait_until(lambda: measure.now() > after + SETTLED_S, LIMIT, "a settled command line")
        if process.poll() is not None:
            raise measure.MeasurementFailed("the command line that follows has ended")
        peak = clusters.peak_memory(process.pid)
    clusters.clear(bench, process)
    return peak


if __name__ == "__main__":
    main()
