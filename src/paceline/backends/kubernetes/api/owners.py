"""Which object has created another. Labels can be set by anybody who may create pods, and prove nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightkube.resources.apps_v1 import ReplicaSet

from paceline.backends.kubernetes.api.cluster import Cluster, Refused


def controller(created: Any) -> str:
    """The uid of the object that has created this one; empty: none."""
    owner = _controlling(created)
    return str(owner.uid) if owner else ""


def pods_of_deployment(cluster: Cluster, deployment: Any, pods: Iterable[Any]) -> list[Any]:
    """Of these pods, those that a ReplicaSet of the Deployment has created."""
    sets: dict[tuple[str, str], bool] = {}
    own = []
    for pod in pods:
        owner = _controlling(pod)
        if owner is None or owner.kind != "ReplicaSet":
            continue
        key = str(owner.name), str(owner.uid)
        if key not in sets:
            sets[key] = _is_of(cluster, deployment, *key)
        if sets[key]:
            own.append(pod)
    return own


def _is_of(cluster: Cluster, deployment: Any, name: str, uid: str) -> bool:
    try:
        replica_set = cluster.find(ReplicaSet, name)
    except Refused as refused:
        if refused.reason == "Forbidden":
            return name.startswith(f"{deployment.metadata.name}-")  # as the cluster names its ReplicaSets
        raise
    is_same = replica_set is not None and str(replica_set.metadata.uid) == uid
    return is_same and controller(replica_set) == str(deployment.metadata.uid)


def _controlling(created: Any) -> Any:
    return next((owner for owner in created.metadata.ownerReferences or [] if owner.controller), None)
