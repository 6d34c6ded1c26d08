"""Changes the number of pods of a role: the completions and the parallelism of its Indexed Job."""

from __future__ import annotations

from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.types import PatchType

from paceline.backends.kubernetes.api.cluster import Cluster, Refused
from paceline.backends.kubernetes.objects import names
from paceline.errors import PacelineError

MOST_PODS = 100_000  # that a role of a job can have


def resize(cluster: Cluster, run: str, role: str, hosts: int, can_remove: bool) -> bool:
    """Take the next step towards a Job with this many pods; whether it has them. `can_remove`: the pods that are no
    longer wanted have exited: those that run would be killed."""
    name = names.job_of(run, names.HostPool(role, 0, ()))
    job: Any = cluster.find(Job, name)
    if job is None or job.spec is None:
        raise PacelineError(f"the Job {name} does not exist")
    try:
        completed = indexes((job.status and job.status.completedIndexes) or "")
    except ValueError:
        raise PacelineError(f"the Job {name} has an invalid list of completed indexes") from None
    target = next_size(job.spec.completions or 0, completed, hosts, can_remove)
    if target == job.spec.completions:
        return target == hosts and max(completed, default=0) < target
    patch = {"spec": {"completions": target, "parallelism": target}}
    try:
        cluster.request(
            f"change the size of the Job {name}",
            lambda: cluster.client.patch(Job, name, patch, patch_type=PatchType.MERGE),
        )
    except Refused as error:
        raise error.after(f"the captain of {run} expects {hosts} {role} hosts") from None
    return False


def next_size(current: int, completed: set[int], hosts: int, can_remove: bool) -> int:
    """The size that a Job can have next. A pod that has exited is not replaced, unless its index is removed first.

    >>> next_size(2, set(), 4, True), next_size(4, set(), 2, False), next_size(4, {2, 3}, 2, True)
    (4, 4, 2)
    >>> next_size(4, {2, 3}, 4, True), next_size(2, {2, 3}, 4, True), next_size(2, set(), 4, True)
    (2, 2, 4)
    """
    if any(index >= current for index in completed):
        return current  # the cluster has not yet noticed that these indexes were removed
    running = current
    while running > 1 and running - 1 in completed:
        running -= 1
    if running < min(current, hosts):
        return running
    return hosts if hosts > current or can_remove else current


def indexes(text: str) -> set[int]:
    """ValueError: no Job can have these, but anyone who may change its status can have written them.

    >>> sorted(indexes("0,2-4")), indexes("")
    ([0, 2, 3, 4], set())
    """
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < MOST_PODS:
            raise ValueError(part)
        numbers.update(range(begin, end + 1))
    return numbers
