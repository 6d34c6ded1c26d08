"""Whether pods on several nodes can mount a volume claim."""

from __future__ import annotations

from collections.abc import Iterable

from lightkube.resources.core_v1 import PersistentVolumeClaim

from paceline.backends.kubernetes.api.cluster import Cluster, Refused
from paceline.backends.kubernetes.serving.deployment import NotServed

ONE_POD, MANY, READ = "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"


def need_one_node(cluster: Cluster, claims: Iterable[str]) -> bool:
    """Whether all pods that mount these claims must be on the same node."""
    shared = [_is_shared(cluster, claim) for claim in claims]
    return not all(shared)


def _is_shared(cluster: Cluster, claim: str) -> bool:
    try:
        volume_claim = cluster.find(PersistentVolumeClaim, claim)
    except Refused as error:
        if error.reason == "Forbidden":
            return False  # unknown: most claims are not shared
        raise
    if volume_claim is None:
        raise NotServed(f"there is no PersistentVolumeClaim {claim} in {cluster.namespace}")
    spec, status = volume_claim.spec, volume_claim.status
    modes = set((status.accessModes if status else None) or (spec.accessModes if spec else []))
    if ONE_POD in modes:
        raise NotServed(
            f"the claim {claim} is {ONE_POD}: only one pod can mount it, and an update needs two",
            remedy=f"serve a run with its snapshots in a bucket, or in a claim that is {MANY} or ReadWriteOnce",
        )
    return MANY in modes or modes == {READ}
