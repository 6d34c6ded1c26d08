"""API requests a minute of a command line that follows a run of 1,000 pods, counted by the API server's audit log."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import clusters
import measure

LIMIT = 240.0
GOAL = 10.0  # requests a minute while nothing changes
CALM_S = 10.0  # without a request, after all pods run: then nothing changes any more


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1.5, help="that are counted")
    given = parser.parse_args()
    where = measure.machine("lightkube")
    measure.say(f"`paceline run --on kubernetes` follows a run of {given.pods:,} pods on simulated nodes (kwok), which")
    measure.say("write nothing and stay. Counted: what the API server has received from this person, by its audit log.")
    measure.say(f"On: {where}\n")
    with clusters.place(nodes=1, pod_start=0.0) as here, clusters.Watch(here) as watch:
        began = measure.now()
        process = clusters.submit(here, clusters.write_loop(here.folder, given.pods))
        running = watch.all_running(given.pods + 1, LIMIT, process) - began
        watch.end()
        measure.progress(f"all pods run after {running:.1f} s")
        started = _calm(here)
        used = measure.cpu_seconds(process.pid)
        time.sleep(60 * given.minutes)
        quiet = here.cluster.requests(clusters.USER)[len(started) :]
        used = (measure.cpu_seconds(process.pid) - used) / (60 * given.minutes)
        if process.poll() is not None:
            raise measure.TookTooLong("the command line that follows has ended")
        memory = clusters.peak_memory(process.pid)
        clusters.clear(here, process)
    rate = len(quiet) / given.minutes
    measure.table(
        ["", "requests", "which"],
        [
            ["until all is quiet", str(len(started)), _words(started)],
            [f"{given.minutes:g} min in which nothing changes", str(len(quiet)), _words(quiet)],
        ],
    )
    measure.say(f"{rate:.1f} a minute (at most {GOAL:g}); {100 * used:.1f}% of one core, {memory:.0f} MB at most\n")
    measure.finish(
        {
            "bench": "cluster_follow", "machine": where, "pods": given.pods, "minutes": given.minutes,
            "requests_to_start": len(started), "requests": len(quiet), "per_minute": rate, "goal_per_minute": GOAL,
            "reached": rate <= GOAL, "cpu": round(used, 4), "cli_peak_mb": round(memory, 1),
        }
    )  # fmt: skip


def _calm(here: clusters.Place) -> list[dict[str, Any]]:
    """All requests up to the moment from which on none has come for a while."""
    last, since = -1, time.monotonic()

    def calm() -> bool:
        nonlocal last, since
        count = len(here.cluster.requests(clusters.USER))
        if count != last:
            last, since = count, time.monotonic()
        return time.monotonic() - since > CALM_S

    measure.wait_until(calm, LIMIT, f"{CALM_S:g} s without a request", every=0.5)
    return here.cluster.requests(clusters.USER)


def _words(requests: list[dict[str, Any]]) -> str:
    kinds = Counter(" ".join([each["verb"], *_about(each.get("objectRef") or {})]) for each in requests)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "-"


def _about(reference: dict[str, str]) -> list[str]:
    return ["/".join(filter(None, [reference.get("resource"), reference.get("subresource")]))]


if __name__ == "__main__":
    main()
