"""SIGKILL of a task in a pod to the next step of the group, in place and warm, against new pods for the same job."""

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
from clusters import Place

START_LIMIT = 240.0
RESTART_LIMIT = 180.0
SETTLED = 5  # steps of every worker before something happens to them
GOAL = 0.3  # of the time with new pods
GOAL_S = 3.0
IMAGES = {"tensorflow": ("tensorflow", "lab.local/tensorflow:1"), "torch": ("torch-jax", "lab.local/torch-jax:1")}
SIDES = ("in place", "new pods")
_OF_ITS_JOB = ("controller-uid", "job-name")  # labels that a Job gives its pods


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=list(IMAGES), default="tensorflow")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="of each side, all in one run")
    given = parser.parse_args()
    image, name = IMAGES[given.framework]
    where = measure.machine("tensorflow-cpu" if given.framework == "tensorflow" else "torch")
    measure.say(f"One run of {given.workers} {given.framework} workers, each on a node of a real cluster. In place:")
    measure.say("SIGKILL of one task, once all spares are ready. New pods: the workers' Job is deleted and made")
    measure.say("again, as JobSet does; the new pods do not wait for the old ones to end, which have 1 s.")
    measure.say("Interleaved. Until every worker has done a step in the next generation.")
    measure.say(f"On: {where}\n")
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    warm: list[bool] = []
    with (
        clusters.place(nodes=given.workers, images=("plain", image)) as here,
        _run(here, given.framework, name, given.workers) as run,
    ):
        for number in range(given.rounds):
            for side in SIDES:
                run.steps(SETTLED, START_LIMIT)
                old = run.generation
                before = run.kill(number % given.workers) if side == "in place" else run.new_pods()
                taken[side].append(run.steps(1, RESTART_LIMIT, after=old) - before)
                if side == "in place":
                    warm += run.warm()
                elif any(run.warm()):
                    raise measure.TookTooLong("the old pods were to go, and have started the next generation")
                measure.progress(f"round {number + 1} {side}: {taken[side][-1]:.3f} s")
    _report(given.framework, given.workers, where, taken, warm, run.imported)


def _report(
    framework: str,
    workers: int,
    where: dict[str, Any],
    taken: dict[str, list[float]],
    warm: list[bool],
    imported: list[float],
) -> None:
    ours, theirs = (measure.median(taken[side]) for side in SIDES)
    share = measure.ratio(ours, theirs)
    rows = [[side, measure.seconds(measure.median(taken[side])), measure.spread(taken[side])] for side in SIDES]
    measure.table(["side", "median", "range"], rows)
    measure.say(f"ratio {share} (at most {GOAL}; goal {GOAL_S:g} s); in place, {sum(warm)} of {len(warm)} tasks came")
    measure.say(f"from a spare, and spares had imported for {measure.spread(imported)} s\n")
    measure.finish(
        {
            "bench": "cluster_restart", "framework": framework, "workers": workers, "machine": where,
            "in_place_s": ours, "new_pods_s": theirs, "ratio": share, "goal_ratio": GOAL, "goal_s": GOAL_S,
            "reached": share is not None and share <= GOAL, "warm_starts": sum(warm), "starts_in_place": len(warm),
            "spares_imported_s": imported,
            "in_place_all_s": taken["in place"], "new_pods_all_s": taken["new pods"],
        }
    )  # fmt: skip


@contextmanager
def _run(here: Place, framework: str, image: str, workers: int) -> Iterator[Run]:
    shared = here.cluster.shared_volume(here.namespace, "shared")
    job = {
        "name": "bench", "framework": framework, "code": str(measure.PROGRAMS),
        "command": ["python", f"{framework}_steps.py", "--steps", "1000000", "--sleep", "0.05"],
        "roles": {"worker": {"replicas": workers}},
        "env": {"BENCH_STAMPS": "/shared/stamps", "TF_CPP_MIN_LOG_LEVEL": "1", "OMP_NUM_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1"},
        "limits": {"grace": "1s"},  # what the old pods take to end is part of the comparison
        "kubernetes": {"image": image, "image_pull_policy": "IfNotPresent", "placement": "spread",
                       "volumes": [{"mount": "/shared", "claim": "shared"}]},
    }  # fmt: skip
    if framework == "tensorflow":
        job["strategy"] = "multi-worker"
    path = here.folder / "job.yaml"
    path.write_text(json.dumps(job))
    process = clusters.submit(here, path)
    try:
        yield Run(here, shared / "stamps", workers, process)
    finally:
        process.kill()
        process.wait()


@dataclass
class Run:
    """A run that is followed: what its programs have stamped, and what its captain tells."""

    here: Place
    stamps: Path
    workers: int
    process: subprocess.Popen[bytes]
    generation: int = 0
    older: int = 0  # the last generation before the pods there are now
    imported: list[float] = field(default_factory=list)  # seconds, of the spares that were there when a task was killed

    def steps(self, count: int, limit: float, after: int = 0) -> float:
        """When every worker had done so many steps in the newest generation, one that came after the given one."""

        def done() -> float | None:
            if self.process.poll() is not None:
                raise measure.TookTooLong(f"the run has ended with {self.process.returncode}")
            events = self._events("task-started")
            self.generation = max((each["generation"] for each in events), default=0)
            if self.generation <= after:
                return None
            started = {each["task"]: each["at"] for each in events if each["generation"] == self.generation}
            found = measure.stamps(self.stamps)
            reached = []
            for rank in range(self.workers):
                since = started.get(f"worker-{rank}")
                # Steps of this generation's processes: those before had ended when these were started.
                mine = [each.at for each in found if since is not None and each.rank == rank and each.at > _time(since)]
                if len(mine) < count:
                    return None
                reached.append(mine[count - 1])
            return max(reached)

        words = f"{count} steps of {self.workers} workers after generation {after}"
        return float(measure.wait_until(done, limit, words, every=0.1))

    def kill(self, rank: int) -> float:
        """When it was done."""
        events = [each for each in self._events("task-started") if each["generation"] == self.generation]
        started = {each["task"]: each["pid"] for each in events}
        task = self._outside(self._pods()[rank], started[f"worker-{rank}"])
        self.imported += measure.wait_until(self._spares, START_LIMIT, "a spare on every host", every=0.2)
        before = measure.now()
        os.kill(task, signal.SIGKILL)
        return before

    def _spares(self) -> list[float] | None:
        """How long they took for their imports, once every host has one."""
        ready = [each for each in self._events("spare-ready") if each["generation"] > self.older]
        taken = {each["host"]: float(each["took_s"]) for each in ready}
        return list(taken.values()) if len(taken) == self.workers else None

    def new_pods(self) -> float:
        """The workers' Job is made again. To delete its pods alone would take longer: a Job that has lost pods waits
        before it makes others, 10 s and twice as long each time."""
        cluster, here = self.here.cluster, f"--namespace={self.here.namespace}"
        found = cluster.get("jobs", "--selector=paceline.dev/role=worker", here)["items"][0]
        metadata = {name: found["metadata"][name] for name in ("name", "labels", "ownerReferences")}
        template = found["spec"]["template"]
        labels = {name: value for name, value in template["metadata"]["labels"].items() if "batch." not in name}
        template["metadata"]["labels"] = {name: labels[name] for name in labels if name not in _OF_ITS_JOB}
        spec = {name: value for name, value in found["spec"].items() if name != "selector"}
        again = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": metadata, "spec": spec}
        self.older = self.generation
        before = measure.now()
        cluster.kubectl("replace", "--force", "--cascade=background", "--filename=-", here, input=json.dumps(again))
        return before

    def warm(self) -> list[bool]:
        """Which tasks of this generation came from a spare."""
        return [each["warm"] for each in self._events("task-started") if each["generation"] == self.generation]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        paths = list(self.here.folder.glob("home/runs/*/events.jsonl"))
        lines = [line for path in paths for line in path.read_text().splitlines() if line.endswith("}")]
        return [each for each in map(json.loads, lines) if each["event"] == kind]

    def _pods(self) -> dict[int, str]:
        """index -> uid"""
        selected = ["pods", "--selector=paceline.dev/role=worker", f"--namespace={self.here.namespace}"]
        label = "batch.kubernetes.io/job-completion-index"
        found = [pod["metadata"] for pod in self.here.cluster.get(*selected)["items"]]
        return {int(each["labels"][label]): each["uid"] for each in found if "deletionTimestamp" not in each}

    def _outside(self, pod: str, pid: int) -> int:
        """The number that a process of a pod has on this machine."""
        for each in _processes(pod):
            status = Path(f"/proc/{each}/status").read_text()
            inside = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
            if int(inside) == pid:
                return each
        raise measure.TookTooLong(f"there is no process {pid} in the pod {pod}")


def _processes(pod: str) -> list[int]:
    """By their numbers on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if f"pod{pod}" in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            pass  # it has ended
    return found


def _time(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp).timestamp()


if __name__ == "__main__":
    main()
