"""Time from SIGKILL of a task in a pod to the next step of the group: warm in place, compared with new pods."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clusters
import measure
from clusters import BenchCluster

START_LIMIT = 240.0
RESTART_LIMIT = 180.0
SETTLED = 5  # steps of every worker before a kill or new pods
GOAL = 0.3  # as a share of the time with new pods
GOAL_S = 3.0
IMAGES = {"tensorflow": ("tensorflow", "lab.local/tensorflow:1"), "torch": ("torch-jax", "lab.local/torch-jax:1")}
SIDES = ("in place", "new pods")
_JOB_LABELS = ("controller-uid", "job-name")  # labels that a Job gives its pods


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=list(IMAGES), default="tensorflow")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each side, all in one run")
    args = parser.parse_args()
    image, name = IMAGES[args.framework]
    machine_info = measure.machine("tensorflow-cpu" if args.framework == "tensorflow" else "torch")
    measure.say(f"One run of {args.workers} {args.framework} workers, each on a node of a real cluster. In place:")
    measure.say("SIGKILL of one task, once all spares are ready. New pods: the workers' Job is deleted and recreated,")
    measure.say("as JobSet does; the new pods do not wait until the old ones end, which have a grace period of 1 s.")
    measure.say("Interleaved. Measured until every worker has done a step in the next generation.")
    measure.say(f"On: {machine_info}\n")
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    warm: list[bool] = []
    with (
        clusters.bench_cluster(nodes=args.workers, images=("plain", image)) as bench,
        _run(bench, args.framework, name, args.workers) as run,
    ):
        for number in range(args.rounds):
            for side in SIDES:
                run.steps(SETTLED, START_LIMIT)
                old = run.generation
                before = run.kill(number % args.workers) if side == "in place" else run.new_pods()
                times[side].append(run.steps(1, RESTART_LIMIT, after=old) - before)
                if side == "in place":
                    warm += run.warm()
                elif any(run.warm()):
                    raise measure.MeasurementFailed("the next generation was started by the old pods")
                measure.progress(f"round {number + 1} {side}: {times[side][-1]:.3f} s")
    _report(args.framework, args.workers, machine_info, times, warm, run.imported)


def _report(
    framework: str,
    workers: int,
    machine_info: dict[str, Any],
    times: dict[str, list[float]],
    warm: list[bool],
    imported: list[float],
) -> None:
    ours, theirs = (measure.median(times[side]) for side in SIDES)
    share = measure.ratio(ours, theirs)
    rows = [[side, measure.seconds(measure.median(times[side])), measure.spread(times[side])] for side in SIDES]
    measure.table(["side", "median", "range"], rows)
    measure.say(f"ratio {share} (at most {GOAL}; goal {GOAL_S:g} s); in place, {sum(warm)} of {len(warm)} tasks")
    measure.say(f"started from a spare, and the imports of spares took {measure.spread(imported)} s\n")
    measure.finish(
        {
            "bench": "cluster_restart", "framework": framework, "workers": workers, "machine": machine_info,
            "in_place_s": ours, "new_pods_s": theirs, "ratio": share, "goal_ratio": GOAL, "goal_s": GOAL_S,
            "reached": share is not None and share <= GOAL, "warm_starts": sum(warm), "starts_in_place": len(warm),
            "spares_imported_s": imported,
            "in_place_all_s": times["in place"], "new_pods_all_s": times["new pods"],
        }
    )  # fmt: skip


@contextmanager
def _run(bench: BenchCluster, framework: str, image: str, workers: int) -> Iterator[Run]:
    shared = bench.cluster.shared_volume(bench.namespace, "shared")
    job = {
        "name": "bench", "framework": framework, "code": str(measure.PROGRAMS),
        "command": ["python", f"{framework}_steps.py", "--steps", "1000000", "--sleep", "0.05"],
        "roles": {"worker": {"replicas": workers}},
        "env": {"BENCH_STAMPS": "/shared/stamps", "TF_CPP_MIN_LOG_LEVEL": "1", "OMP_NUM_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1"},
        "limits": {"grace": "1s"},  # the time in which the old pods end is part of the comparison
        "kubernetes": {"image": image, "image_pull_policy": "IfNotPresent", "placement": "spread",
                       "volumes": [{"mount": "/shared", "claim": "shared"}]},
    }  # fmt: skip
    if framework == "tensorflow":
        job["strategy"] = "multi-worker"
    path = bench.folder / "job.yaml"
    path.write_text(json.dumps(job))
    process = clusters.submit(bench, path)
    try:
        yield Run(bench, shared / "stamps", workers, process)
    finally:
        process.kill()
        process.wait()


@dataclass
class Run:
    """A run that is followed: stamps of its programs, and events of its captain."""

    bench: BenchCluster
    stamps: Path
    workers: int
    process: subprocess.Popen[bytes]
    generation: int = 0
    last_generation_of_old_pods: int = 0  # the last generation before the current pods
    imported: list[float] = field(default_factory=list)  # seconds, of the spares at the time of a kill

    def steps(self, count: int, limit: float, after: int = 0) -> float:
        """When every worker had done `count` steps in the newest generation, which is later than `after`."""

        def time_of_last() -> float | None:
            if self.process.poll() is not None:
                raise measure.MeasurementFailed(f"the run ended with {self.process.returncode}")
            events = self._events("task-started")
            self.generation = max((each["generation"] for each in events), default=0)
            if self.generation <= after:
                return None
            started = {each["task"]: each["at"] for each in events if each["generation"] == self.generation}
            stamps = measure.stamps(self.stamps)
            last_steps = []
            for rank in range(self.workers):
                since = started.get(f"worker-{rank}")
                # Only steps of this generation's processes: earlier ones had ended when these were started.
                own_steps = [
                    each.at for each in stamps if since is not None and each.rank == rank and each.at > _time(since)
                ]
                if len(own_steps) < count:
                    return None
                last_steps.append(own_steps[count - 1])
            return max(last_steps)

        description = f"{count} steps of {self.workers} workers after generation {after}"
        return float(measure.wait_until(time_of_last, limit, description, every=0.1))

    def kill(self, rank: int) -> float:
        """Kill the worker; return the time."""
        events = [each for each in self._events("task-started") if each["generation"] == self.generation]
        started = {each["task"]: each["pid"] for each in events}
        task = self._pid_on_machine(self._pods()[rank], started[f"worker-{rank}"])
        self.imported += measure.wait_until(self._spares, START_LIMIT, "a spare on every host", every=0.2)
        before = measure.now()
        os.kill(task, signal.SIGKILL)
        return before

    def _spares(self) -> list[float] | None:
        """How long the imports of the spares took, once every host has a spare."""
        ready = [each for each in self._events("spare-ready") if each["generation"] > self.last_generation_of_old_pods]
        import_times = {each["host"]: float(each["took_s"]) for each in ready}
        return list(import_times.values()) if len(import_times) == self.workers else None

    def new_pods(self) -> float:
        """Recreate the workers' Job. Deleting only its pods would take longer: a Job that has lost pods waits before it
        creates others, for 10 s and twice as long each time."""
        cluster, in_namespace = self.bench.cluster, f"--namespace={self.bench.namespace}"
        job = cluster.get("jobs", "--selector=paceline.dev/role=worker", in_namespace)["items"][0]
        metadata = {name: job["metadata"][name] for name in ("name", "labels", "ownerReferences")}
        template = job["spec"]["template"]
        labels = {name: value for name, value in template["metadata"]["labels"].items() if "batch." not in name}
        template["metadata"]["labels"] = {name: labels[name] for name in labels if name not in _JOB_LABELS}
        spec = {name: value for name, value in job["spec"].items() if name != "selector"}
        new_job = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": metadata, "spec": spec}
        self.last_generation_of_old_pods = self.generation
        before = measure.now()
        cluster.kubectl(
            "replace", "--force", "--cascade=background", "--filename=-", in_namespace, input=json.dumps(new_job)
        )
        return before

    def warm(self) -> list[bool]:
        """Which tasks of this generation came from a spare."""
        return [each["warm"] for each in self._events("task-started") if each["generation"] == self.generation]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        paths = list(self.bench.folder.glob("home/runs/*/events.jsonl"))
        lines = [line for path in paths for line in path.read_text().splitlines() if line.endswith("}")]
        return [each for each in map(json.loads, lines) if each["event"] == kind]

    def _pods(self) -> dict[int, str]:
        """index -> uid"""
        selected = ["pods", "--selector=paceline.dev/role=worker", f"--namespace={self.bench.namespace}"]
        label = "batch.kubernetes.io/job-completion-index"
        pods = [pod["metadata"] for pod in self.bench.cluster.get(*selected)["items"]]
        return {int(each["labels"][label]): each["uid"] for each in pods if "deletionTimestamp" not in each}

    def _pid_on_machine(self, pod: str, pid: int) -> int:
        """The PID on this machine of a process in a pod."""
        for each in _processes(pod):
            status = Path(f"/proc/{each}/status").read_text()
            inside = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
            if int(inside) == pid:
                return each
        raise measure.MeasurementFailed(f"pod {pod} has no process {pid}")


def _processes(pod: str) -> list[int]:
    """PIDs on this machine of all processes in a pod."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if f"pod{pod}" in path.read_text():
                pids.append(int(path.parent.name))
        except OSError:
            pass  # it has ended
    return pids


def _time(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp).timestamp()


if __name__ == "__main__":
    main()
