"""API requests per minute of a command line that follows a run of 1,000 pods, from the API server's audit log."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import clusters
import measure

LIMIT = 240.0
GOAL = 10.0  # requests per minute while nothing changes
QUIET_S = 10.0  # without a request after all pods run, before counting begins


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1.5, help="duration of the measurement")
    args = parser.parse_args()
    machine_info = measure.machine("lightkube")
    measure.say(f"`paceline run --on kubernetes` follows a run of {args.pods:,} pods on simulated nodes (kwok), which")
    measure.say("write no output. Counted: requests of this user, from the API server's audit log.")
    measure.say(f"On: {machine_info}\n")
    with clusters.bench_cluster(nodes=1, pod_start=0.0) as bench, clusters.Watch(bench) as watch:
        began = measure.now()
        process = clusters.submit(bench, clusters.write_loop(bench.folder, args.pods))
        running = watch.all_running(args.pods + 1, LIMIT, process) - began
        watch.end()
        measure.progress(f"all pods run after {running:.1f} s")
        start_requests = _wait_until_quiet(bench)
        cpu = measure.cpu_seconds(process.pid)
        time.sleep(60 * args.minutes)
        requests = bench.cluster.requests(clusters.USER)[len(start_requests) :]
        cpu = (measure.cpu_seconds(process.pid) - cpu) / (60 * args.minutes)
        if process.poll() is not None:
            raise measure.MeasurementFailed("the command line that follows has ended")
        memory = clusters.peak_memory(process.pid)
        clusters.clear(bench, process)
    rate = len(requests) / args.minutes
    measure.table(
        ["period", "requests", "kinds"],
        [
            ["until nothing changes", str(len(start_requests)), _summary(start_requests)],
            [f"{args.minutes:g} min without changes", str(len(requests)), _summary(requests)],
        ],
    )
    measure.say(
        f"{rate:.1f} per minute (at most {GOAL:g}); {100 * cpu:.1f}% of one core, peak memory {memory:.0f} MB\n"
    )
    measure.finish(
        {
            "bench": "cluster_follow", "machine": machine_info, "pods": args.pods, "minutes": args.minutes,
            "requests_to_start": len(start_requests), "requests": len(requests), "per_minute": rate,
            "goal_per_minute": GOAL, "reached": rate <= GOAL, "cpu": round(cpu, 4), "cli_peak_mb": round(memory, 1),
        }
    )  # fmt: skip


def _wait_until_quiet(bench: clusters.BenchCluster) -> list[dict[str, Any]]:
    """All requests until there have been none for a while."""
    last, since = -1, time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        count = len(bench.cluster.requests(clusters.USER))
        if count != last:
            last, since = count, time.monotonic()
        return time.monotonic() - since > QUIET_S

    measure.wait_until(is_quiet, LIMIT, f"{QUIET_S:g} s without a request", every=0.5)
    return bench.cluster.requests(clusters.USER)


def _summary(requests: list[dict[str, Any]]) -> str:
    kinds = Counter(" ".join([each["verb"], *_resource(each.get("objectRef") or {})]) for each in requests)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "-"


def _resource(reference: dict[str, str]) -> list[str]:
    return ["/".join(filter(None, [reference.get("resource"), reference.get("subresource")]))]


if __name__ == "__main__":
    main()
