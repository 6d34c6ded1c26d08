"""Time from SIGKILL of a task in a pod to the next step of the group: warm in place, compared with new pods.

With --state-gib also from the deletion of a pod, and from the loss of a node.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import time
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
IN_PLACE, POD, NODE, NEW_PODS = "in place", "pod deleted", "node off", "new pods"
SIDES = (IN_PLACE, NEW_PODS)
STATE_SIDES = (IN_PLACE, POD, NEW_PODS)  # the loss of a node is measured once, at the end
EVERY_S = 60  # with a large state: seconds between two saves
_JOB_LABELS = ("controller-uid", "job-name")  # labels that a Job gives its pods


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=list(IMAGES), default="tensorflow")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each side, all in one run")
    parser.add_argument("--state-gib", type=float, default=0.0, help="torch: a state of this size, saved to a claim")
    args = parser.parse_args()
    if args.state_gib and args.framework != "torch":
        parser.error("--state-gib requires --framework torch")
    image, name = IMAGES[args.framework]
    sides = STATE_SIDES if args.state_gib else SIDES
    machine_info = measure.machine("tensorflow-cpu" if args.framework == "tensorflow" else "torch")
    measure.say(f"One run of {args.workers} {args.framework} workers, each on a node of a real cluster. In place:")
    measure.say("SIGKILL of one task, once all spares are ready. New pods: the workers' Job is deleted and recreated,")
    measure.say("as JobSet does; the new pods do not wait until the old ones end, which have a grace period of 1 s.")
    measure.say("Interleaved. Measured until every worker has done a step in the next generation.")
    if args.state_gib:
        measure.say(f"State: {args.state_gib:g} GiB, saved every {EVERY_S} s and committed; new pods fetch it.")
        measure.say("Killed or deleted in the middle between two saves, once the last one is committed.")
        measure.say("Pod deleted: one worker's, including the start of another pod. Node off: a worker's, once.")
    measure.say(f"On: {machine_info}\n")
    times: dict[str, list[float]] = {side: [] for side in (*sides, *([NODE] if args.state_gib else []))}
    warm: list[bool] = []
    with (
        clusters.bench_cluster(nodes=args.workers + bool(args.state_gib), images=("plain", image)) as bench,
        _run(bench, args.framework, name, args.workers, args.state_gib) as run,
    ):
        for number in range(args.rounds):
            for side in sides:
                times[side].append(_measure(run, side, number % args.workers, bool(args.state_gib)))
                if side == IN_PLACE:
                    warm += run.warm()
                elif side == NEW_PODS and any(run.warm()):
                    raise measure.MeasurementFailed("the next generation was started by the old pods")
                measure.progress(f"round {number + 1} {side}: {times[side][-1]:.3f} s")
                for line in run.stages():
                    measure.progress(f"    {line}")
        if args.state_gib:
            times[NODE].append(_measure(run, NODE, args.workers - 1, True))
            measure.progress(f"{NODE}: {times[NODE][-1]:.3f} s")
    _report(args.framework, args.workers, args.state_gib, machine_info, times, warm, run)


def _measure(run: Run, side: str, rank: int, has_state: bool) -> float:
    run.steps(SETTLED, START_LIMIT)
    if has_state:
        run.wait_committed()
        run.wait_between_saves()
    old = run.generation
    act = {IN_PLACE: run.kill, POD: run.delete_pod, NODE: run.power_off, NEW_PODS: lambda _: run.new_pods()}[side]
    before = act(rank)
    return run.steps(1, RESTART_LIMIT, after=old) - before


def _report(
    framework: str,
    workers: int,
    gib: float,
    machine_info: dict[str, Any],
    times: dict[str, list[float]],
    warm: list[bool],
    run: Run,
) -> None:
    ours, theirs, imported = measure.median(times[IN_PLACE]), measure.median(times[NEW_PODS]), run.imported
    share = measure.ratio(ours, theirs)
    rows = [[side, measure.seconds(measure.median(values)), measure.spread(values)] for side, values in times.items()]
    measure.table(["side", "median", "range"], rows)
    if run.pod_starts:
        measure.say(f"from the deletion of a pod to the start of its replacement: {measure.spread(run.pod_starts)} s")
    measure.say(f"ratio {share} (at most {GOAL}; goal {GOAL_S:g} s); in place, {sum(warm)} of {len(warm)} tasks")
    measure.say(f"started from a spare, and the imports of spares took {measure.spread(imported)} s\n")
    measure.finish(
        {
            "bench": "cluster_restart", "framework": framework, "workers": workers, "state_gib": gib,
            "machine": machine_info,
            "in_place_s": ours, "new_pods_s": theirs, "ratio": share, "goal_ratio": GOAL, "goal_s": GOAL_S,
            "reached": share is not None and share <= GOAL, "warm_starts": sum(warm), "starts_in_place": len(warm),
            "spares_imported_s": imported,
            "pod_starts_s": run.pod_starts,
            **{f"{side.replace(' ', '_')}_all_s": values for side, values in times.items()},
        }
    )  # fmt: skip


@contextmanager
def _run(bench: BenchCluster, framework: str, image: str, workers: int, gib: float) -> Iterator[Run]:
    shared = bench.cluster.shared_volume(bench.namespace, "shared")
    program = f"{framework}_state_steps.py" if gib else f"{framework}_steps.py"
    state = ["--gib", str(gib), "--every", f"{EVERY_S}s"] if gib else []
    if gib:
        bench.cluster.shared_volume(bench.namespace, "snapshots", f"{int(8 * gib) + 1}Gi")
    job = {
        "name": "bench", "framework": framework, "code": str(measure.PROGRAMS),
        "command": ["python", program, "--steps", "1000000", "--sleep", "0.05", *state],
        "roles": {"worker": {"replicas": workers}},
        "env": {"BENCH_STAMPS": "/shared/stamps", "TF_CPP_MIN_LOG_LEVEL": "1", "OMP_NUM_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1"},
        "limits": {"grace": "1s"},  # the time in which the old pods end is part of the comparison
        "kubernetes": {"image": image, "image_pull_policy": "IfNotPresent", "placement": "spread",
                       "volumes": [{"mount": "/shared", "claim": "shared"}]},
    }  # fmt: skip
    if framework == "tensorflow":
        job["strategy"] = "multi-worker"
    if gib:
        job["snapshots"] = {"to": "claim://snapshots/bench", "keep": 2}
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
    pod_starts: list[float] = field(default_factory=list)  # seconds from the deletion of a pod until another one runs

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

    def stages(self) -> list[str]:
        """Where the time of the newest generation's start went."""
        events = [*self._events("generation-formed"), *self._events("start-times")]
        return [json.dumps(each) for each in events if each["generation"] == self.generation]

    def kill(self, rank: int) -> float:
        """Kill the worker; return the time."""
        events = [each for each in self._events("task-started") if each["generation"] == self.generation]
        started = {each["task"]: each["pid"] for each in events}
        task = self._pid_on_machine(self._pods()[rank], started[f"worker-{rank}"])
        self.imported += measure.wait_until(self._spares, START_LIMIT, "a spare on every host", every=0.2)
        before = measure.now()
        os.kill(task, signal.SIGKILL)
        return before

    def wait_committed(self) -> None:
        """Wait until this generation has committed a snapshot: then new pods find it in the store."""

        def has_committed() -> bool:
            return any(each["generation"] == self.generation for each in self._events("committed"))

        measure.wait_until(has_committed, START_LIMIT, f"a commit of generation {self.generation}", every=0.2)

    def wait_between_saves(self) -> None:
        """Wait until the middle between two saves: failures come at any time, and hosts fetch a snapshot after it."""
        saved = max(_time(each["at"]) for each in self._events("saved"))
        middle = saved + EVERY_S * (0.5 + max(0, round((measure.now() - saved) / EVERY_S)))
        time.sleep(max(0.0, middle - measure.now()))

    def delete_pod(self, rank: int) -> float:
        """Delete a worker's pod, without a grace period; return the time."""
        old = self._pods()[rank]
        before = measure.now()
        self._kubectl("delete", "pod", "--force", "--grace-period=0", "--wait=false", self._pod_name(old))
        new = measure.wait_until(lambda: self._pods().get(rank) not in (None, old), RESTART_LIMIT, "another pod", 0.1)
        assert new
        measure.wait_until(lambda: self._is_running(rank), RESTART_LIMIT, "a running pod", 0.1)
        self.pod_starts.append(measure.now() - before)
        return before

    def power_off(self, _: int) -> float:
        """Power off the node of a worker, not that of the captain; return the time."""
        pods = self.bench.cluster.get("pods", f"--namespace={self.bench.namespace}")["items"]
        nodes = {pod["metadata"]["labels"]["paceline.dev/role"]: pod["spec"]["nodeName"] for pod in pods}
        workers = [pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["uid"] in self._pods().values()]
        node = next(each for each in workers if each != nodes["captain"])
        before = measure.now()
        self.bench.cluster.power_off(node)
        return before

    def _kubectl(self, *arguments: str) -> str:
        return self.bench.cluster.kubectl(*arguments, f"--namespace={self.bench.namespace}")

    def _pod_name(self, uid: str) -> str:
        items = self.bench.cluster.get("pods", f"--namespace={self.bench.namespace}")["items"]
        return str(next(pod["metadata"]["name"] for pod in items if pod["metadata"]["uid"] == uid))

    def _is_running(self, rank: int) -> bool:
        items = self.bench.cluster.get("pods", f"--namespace={self.bench.namespace}")["items"]
        phases = {pod["metadata"]["uid"]: pod["status"].get("phase") for pod in items}
        return phases.get(self._pods().get(rank, "")) == "Running"

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
