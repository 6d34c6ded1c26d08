"""Makes the objects of a run: all suspended, owned by the captain's Job, released once everything is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightkube import codecs
from lightkube.resources.batch_v1 import Job
from lightkube.types import CascadeType, PatchType

from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.prepare import CannotSubmit

Object = dict[str, Any]


def submit(cluster: Cluster, run: str, objects: Sequence[Object]) -> None:
    """`objects` as rendered, suspended: the captain's Job comes first. What a failure leaves behind is deleted."""
    captain, others = objects[0], objects[1:]
    try:
        made = cluster.ask(f"create the Job {run}", lambda: cluster.client.create(codecs.from_dict(captain)))
    except Refused as refused:
        if refused.reason == "AlreadyExists":
            raise CannotSubmit(
                f"there is a run {run} in {cluster.namespace} already; `paceline delete {run}` removes it, or give "
                "another id"
            ) from None
        raise
    owner = _owner(run, str(made.metadata.uid if made.metadata else ""))
    try:
        for each in others:
            _create(cluster, each, owner)
        for each in reversed(objects):
            if each["kind"] == "Job":
                release(cluster, each["metadata"]["name"])
    except BaseException:
        withdraw(cluster, run)
        raise


def _create(cluster: Cluster, each: Object, owner: Object) -> None:
    name = each["metadata"]["name"]
    owned = {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
    cluster.ask(f"create the {each['kind']} {name}", lambda: cluster.client.create(codecs.from_dict(owned)))


def release(cluster: Cluster, name: str) -> None:
    patch = {"spec": {"suspend": False}}
    cluster.ask(f"release the Job {name}", lambda: cluster.client.patch(Job, name, patch, patch_type=PatchType.MERGE))


def withdraw(cluster: Cluster, run: str) -> None:
    """Takes everything back: what the captain's Job owns goes with it. Best effort: nothing runs where it fails."""
    try:
        cluster.ask(
            f"delete the Job {run}",
            lambda: cluster.client.delete(Job, run, cascade=CascadeType.BACKGROUND),
        )
    except (Refused, Unreachable):
        pass


def _owner(run: str, uid: str) -> Object:
    """Without blockOwnerDeletion: that would take a right which many people do not have."""
    return {"apiVersion": "batch/v1", "kind": "Job", "name": run, "uid": uid, "controller": False}
