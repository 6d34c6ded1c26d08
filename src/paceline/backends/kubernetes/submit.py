"""Makes the objects of a run: all suspended, owned by the captain's Job, released once everything is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lightkube import codecs
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.batch_v1 import Job
from lightkube.types import PatchType

from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.prepare import Taken

Object = dict[str, Any]

PODS_S = 10.0  # how long big hosts may take to exist before the small ones come, too
PODS_POLL_S = 0.1


class Interrupted(Exception):
    """A person has asked for the end before everything was there; nothing is left."""


class Left(Exception):
    """The submission failed, and what there was of it could not be taken back; the text says why and what to do."""


def submit(
    cluster: Cluster, run: str, objects: Sequence[Object], interrupted: Callable[[], bool], begun: Callable[[str], None]
) -> None:
    """`objects` as rendered, suspended: the captain's Job comes first. What a failure leaves behind is deleted.
    `begun` is told the uid of the captain's Job as soon as there is one."""
    captain, others = objects[0], objects[1:]
    for claim in (each for each in others if _outlives(each)):
        _create(cluster, claim, {}, dry_run=True)  # a right that a person may lack, though all others are there
    try:
        made = cluster.ask(f"create the Job {run}", lambda: cluster.client.create(codecs.from_dict(captain)))
    except Refused as refused:
        if refused.reason == "AlreadyExists":
            raise Taken(
                f"there is a run {run} in {cluster.namespace} already; `paceline delete {run} --on kubernetes -n "
                f"{cluster.namespace}` removes it, or give another id"
            ) from None
        raise
    except Unreachable as error:
        if error.sent:
            raise Left(f"{error}; if it came through: `paceline delete {run}` removes it") from None
        raise
    uid = str(made.metadata.uid if made.metadata else "")
    owner = _owner(run, uid)
    try:
        begun(uid)
        for step in _steps(cluster, captain, others, owner):
            _unless(interrupted, run)
            step()
        _unless(interrupted, run)
    except BaseException as error:
        try:
            withdraw(cluster, run)
        except (Refused, Unreachable):
            raise Left(f"{error}; something of {run} may be left: `paceline delete {run}` removes it") from error
        raise


def _unless(interrupted: Callable[[], bool], run: str) -> None:
    if interrupted():
        raise Interrupted(f"{run} was not started")


def _name(each: Object) -> str:
    return str(each["metadata"]["name"])


def _outlives(each: Object) -> bool:
    """Whether it is not the run's own."""
    return bool(each["kind"] == "PersistentVolumeClaim")


def _create(cluster: Cluster, each: Object, owner: Object, dry_run: bool = False) -> None:
    owned = each if _outlives(each) else {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
    create = partial(cluster.client.create, codecs.from_dict(owned), dry_run=dry_run)
    try:
        cluster.ask(f"create the {each['kind']} {_name(each)}", create)
    except Refused as refused:
        if not _outlives(each) or refused.reason != "AlreadyExists":
            raise


def release(cluster: Cluster, name: str) -> None:
    patch = {"spec": {"suspend": False}}
    cluster.ask(f"release the Job {name}", lambda: cluster.client.patch(Job, name, patch, patch_type=PatchType.MERGE))


def show(cluster: Cluster, name: str) -> None:
    """Start TensorBoard's pod."""
    patch = {"spec": {"replicas": 1}}
    cluster.ask(
        f"scale the Deployment {name}",
        lambda: cluster.client.patch(Deployment, name, patch, patch_type=PatchType.MERGE),
    )


def _steps(cluster: Cluster, captain: Object, others: Sequence[Object], owner: Object) -> Iterator[Callable[[], None]]:
    for each in others:
        yield partial(_create, cluster, each, owner)
    members = sorted((each for each in others if each["kind"] == "Job"), key=_gpus, reverse=True)
    for each, following in zip(members, [*members[1:], captain], strict=True):
        yield partial(release, cluster, _name(each))
        if _gpus(each) > _gpus(following) > 0:
            yield partial(_await_pods, cluster, each)
    yield partial(release, cluster, _name(captain))
    for each in others:
        if each["kind"] == "Deployment":  # after the captain's Job, which ends by itself and takes it along
            yield partial(show, cluster, _name(each))


def _gpus(job: Object) -> int:
    """Of each pod: whatever the resource is called, it is not one that every container has."""
    asked = job["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {})
    return sum(int(amount) for resource, amount in asked.items() if "/" in resource)


def _await_pods(cluster: Cluster, job: Object) -> None:
    """Pods are placed in the order in which they come: a small one must not take the only place of a big one."""
    name, count = job["metadata"]["name"], job["spec"]["parallelism"]
    until = time.monotonic() + PODS_S
    while time.monotonic() < until:
        found = cluster.ask(f"look at the Job {name}", lambda: cluster.client.get(Job, name))
        if found.status is not None and (found.status.active or 0) >= count:
            return
        time.sleep(PODS_POLL_S)


def withdraw(cluster: Cluster, run: str) -> None:
    """Takes everything back: what the captain's Job owns goes with it."""
    cluster.delete(Job, run)


def _owner(run: str, uid: str) -> Object:
    """Without blockOwnerDeletion: that would take a right which many people do not have."""
    return {"apiVersion": "batch/v1", "kind": "Job", "name": run, "uid": uid, "controller": False}
