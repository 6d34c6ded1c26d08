"""Creates the objects of a run: all suspended, owned by the captain's Job, released once all of them exist."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lightkube import codecs
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.batch_v1 import Job
from lightkube.types import PatchType

from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.payload.prepare import Taken
from paceline.errors import Call, PacelineError

Object = dict[str, Any]

PODS_S = 10.0  # how long to wait for the pods of large hosts before smaller ones are released
PODS_POLL_S = 0.1


class Interrupted(Exception):
    """The user has interrupted the submission; everything was deleted again."""


class NotCleanedUp(PacelineError):
    """The submission failed, and some of its objects could not be deleted."""


def submit(
    cluster: Cluster,
    run: str,
    objects: Sequence[Object],
    is_interrupted: Callable[[], bool],
    on_created: Callable[[str], None],
) -> None:
    """`objects` as rendered, suspended: the captain's Job comes first. After a failure, everything is deleted again.
    `on_created` receives the uid of the captain's Job as soon as it exists."""
    captain, others = objects[0], objects[1:]
    for claim in (each for each in others if _outlives(each)):
        _create(cluster, claim, {}, dry_run=True)  # the user may lack this permission, but have all others
    try:
        job = cluster.request(f"create the Job {run}", lambda: cluster.client.create(codecs.from_dict(captain)))
    except Refused as refused:
        if refused.reason == "AlreadyExists":
            raise Taken(
                f"a run {run} already exists in {cluster.namespace}",
                remedy=f"delete it in {cluster.namespace}, or use another id",
            ) from None
        raise
    except Unreachable as error:
        if error.sent:
            raise NotCleanedUp(
                str(error), remedy=("the run may exist on the cluster: `", Call("delete", run), "` removes it")
            ) from None
        raise
    uid = str(job.metadata.uid if job.metadata else "")
    owner = owner_of(run, uid)
    try:
        on_created(uid)
        for step in _steps(cluster, captain, others, owner):
            _check_interrupted(is_interrupted, run)
            step()
        _check_interrupted(is_interrupted, run)
    except BaseException as error:
        try:
            withdraw(cluster, run)
        except (Refused, Unreachable):
            raise NotCleanedUp(
                str(error), remedy=(f"some objects of {run} may remain: `", Call("delete", run), "` removes them")
            ) from error
        raise


def _check_interrupted(is_interrupted: Callable[[], bool], run: str) -> None:
    if is_interrupted():
        raise Interrupted(f"{run} was not started")


def _name(each: Object) -> str:
    return str(each["metadata"]["name"])


def _outlives(each: Object) -> bool:
    """Whether it does not belong to the run."""
    return bool(each["kind"] == "PersistentVolumeClaim")


def _create(cluster: Cluster, each: Object, owner: Object, dry_run: bool = False) -> None:
    owned = each if _outlives(each) else {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
    create = partial(cluster.client.create, codecs.from_dict(owned), dry_run=dry_run)
    try:
        cluster.request(f"create the {each['kind']} {_name(each)}", create)
    except Refused as refused:
        if not _outlives(each) or refused.reason != "AlreadyExists":
            raise


def release(cluster: Cluster, name: str) -> None:
    patch = {"spec": {"suspend": False}}
    cluster.request(
        f"resume the Job {name}", lambda: cluster.client.patch(Job, name, patch, patch_type=PatchType.MERGE)
    )


def start_tensorboard(cluster: Cluster, name: str) -> None:
    patch = {"spec": {"replicas": 1}}
    cluster.request(
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
        if each["kind"] == "Deployment":  # after the captain's Job, which owns it and ends on its own
            yield partial(start_tensorboard, cluster, _name(each))


def _gpus(job: Object) -> int:
    """GPUs of each pod: any extended resource, whose name contains a slash."""
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {})
    return sum(int(amount) for resource, amount in limits.items() if "/" in resource)


def _await_pods(cluster: Cluster, job: Object) -> None:
    """Pods are scheduled in the order of creation: a small pod must not take the only node that fits a large one."""
    name, count = job["metadata"]["name"], job["spec"]["parallelism"]
    until = time.monotonic() + PODS_S
    while time.monotonic() < until:
        status = cluster.request(f"read the Job {name}", lambda: cluster.client.get(Job, name)).status
        if status is not None and (status.active or 0) >= count:
            return
        time.sleep(PODS_POLL_S)


def withdraw(cluster: Cluster, run: str) -> None:
    """Delete the captain's Job, and with it everything that it owns."""
    cluster.delete(Job, run)


def owner_of(run: str, uid: str) -> Object:
    """Without blockOwnerDeletion, which needs a right that many users lack."""
    return {"apiVersion": "batch/v1", "kind": "Job", "name": run, "uid": uid, "controller": False}
