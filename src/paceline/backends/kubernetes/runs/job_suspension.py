"""Ends the pods of a paused run: suspends the Jobs of its members, and later unsuspends them.

The captain's Job stays. Its deadline, which is the backstop of `limits.runtime`, does not apply while the run is
paused: a suspended Job has none either, and gets all of its time again when it is unsuspended.
"""

from __future__ import annotations

import math
import time
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.types import PatchType

from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.objects import names
from paceline.errors import PacelineError
from paceline.plan import CAPTAIN


def suspend(cluster: Cluster, run: str) -> bool:
    """Take the next step towards a run without pods, apart from the captain's; whether it has none. Only once its tasks
    have ended."""
    captain, members = _jobs(cluster, run)
    if captain.spec.activeDeadlineSeconds is not None:
        _patch(cluster, captain, {"activeDeadlineSeconds": None})
    for job in members:
        if not job.spec.suspend:
            _patch(cluster, job, {"suspend": True})
    return all(job.spec.suspend and not _pods(job) for job in members)


def unsuspend(cluster: Cluster, run: str) -> None:
    """Have the Jobs of members create their pods."""
    captain, members = _jobs(cluster, run)
    for job in members:
        if job.spec.suspend:
            _patch(cluster, job, {"suspend": False})
    limit = max((job.spec.activeDeadlineSeconds or 0 for job in members), default=0)
    started = captain.status and captain.status.startTime
    if limit and started and captain.spec.activeDeadlineSeconds is None:
        passed = max(0.0, time.time() - started.timestamp())
        _patch(cluster, captain, {"activeDeadlineSeconds": math.ceil(passed) + limit})


def is_suspended(cluster: Cluster, run: str) -> bool:
    """Whether its members have no pods because it was paused."""
    _, members = _jobs(cluster, run)
    return bool(members) and all(job.spec.suspend and not _pods(job) for job in members)


def is_any_suspended(cluster: Cluster, run: str) -> bool:
    _, members = _jobs(cluster, run)
    return any(job.spec.suspend for job in members)


def _jobs(cluster: Cluster, run: str) -> tuple[Any, list[Any]]:
    """The captain's Job, and those of members, which it owns: anybody may create Jobs with the labels of the run."""
    labels: dict[str, Any] = {names.RUN_LABEL: run}
    jobs: list[Any] = cluster.request("list Jobs", lambda: list(cluster.client.list(Job, labels=labels)))
    jobs = [job for job in jobs if job.metadata and job.spec]
    captain = next((job for job in jobs if job.metadata.name == run), None)
    if captain is None:
        raise PacelineError(f"the Job {run} does not exist")
    own = [job for job in jobs if any(each.uid == captain.metadata.uid for each in job.metadata.ownerReferences or [])]
    return captain, [job for job in own if (job.metadata.labels or {}).get(names.ROLE_LABEL) not in (None, CAPTAIN)]


def _pods(job: Any) -> int:
    """Those that have not ended, also while they are being deleted."""
    return (job.status.active or 0) + (getattr(job.status, "terminating", None) or 0) if job.status else 0


def _patch(cluster: Cluster, job: Any, spec: dict[str, Any]) -> None:
    name, (field, value) = job.metadata.name, next(iter(spec.items()))
    cluster.request(
        f"change {field} of the Job {name}",
        lambda: cluster.client.patch(Job, name, {"spec": {field: value}}, patch_type=PatchType.MERGE),
    )
