"""Volume claims that pods of several nodes would mount: which of them allow it."""

from __future__ import annotations

from collections.abc import Iterable

from lightkube.resources.core_v1 import PersistentVolumeClaim

from paceline.backends.kubernetes.cluster import Cluster, Refused
from paceline.backends.kubernetes.deployed import NotServed

ONE_POD, MANY, READ = "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"


def tied(cluster: Cluster, claims: Iterable[str]) -> bool:
    """Whether pods that mount these can be on one node at a time alone."""
    shared = [_shared(cluster, claim) for claim in claims]
    return not all(shared)


def _shared(cluster: Cluster, claim: str) -> bool:
    try:
        found = cluster.find(PersistentVolumeClaim, claim)
    except Refused as error:
        if error.reason == "Forbidden":
            return False  # as most are
        raise
    if found is None:
        raise NotServed(f"there is no PersistentVolumeClaim {claim} in {cluster.namespace}")
    modes = set((found.status.accessModes if found.status else None) or (found.spec.accessModes if found.spec else []))
    if ONE_POD in modes:
        raise NotServed(
            f"the claim {claim} is {ONE_POD}, for one pod alone, and an update has two: a run with its snapshots in a "
            f"bucket, or in a claim that is {MANY} or ReadWriteOnce, can be served"
        )
    return MANY in modes or modes == {READ}
