"""The permissions that Paceline needs in a namespace, and which of them the user lacks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightkube.models import authorization_v1 as models
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

from paceline.backends.kubernetes.api.cluster import Cluster

PARALLEL_REVIEWS = 8


@dataclass(frozen=True)
class Right:
    """Some verbs on one resource."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    without: str = ""  # what does not work without this permission; empty: no run is possible

    @property
    def kubectl_name(self) -> str:
        """
        >>> Right("batch", "jobs", ()).kubectl_name
        'jobs.batch'
        """
        return f"{self.resource}.{self.group}" if self.group else self.resource


RIGHTS = (
    Right("batch", "jobs", ("create", "get", "list", "watch", "patch", "delete")),
    Right("", "pods", ("list", "watch", "delete")),
    Right("", "pods", ("patch",), "a captain on a lost node is replaced only when the cluster removes the node"),
    Right("", "pods/log", ("get",)),
    Right("", "services", ("create",)),
    Right("", "configmaps", ("create", "get")),
    Right("", "secrets", ("create",)),
    Right("networking.k8s.io", "networkpolicies", ("create",)),
    # A websocket is opened with GET: before 1.35 a server checks only `get`, since then also `create`.
    Right(
        "",
        "pods/exec",
        ("create", "get"),
        "`paceline stop` ends the pods instead of asking the captain; `scale`, `pause`, `resume`, `stacks` and "
        "`profile` fail; and snapshots in pods and claims cannot be read",
    ),
    Right(
        "",
        "events",
        ("list", "watch"),
        "Paceline cannot report why a pod cannot be created or a volume cannot be mounted",
    ),
    Right("", "persistentvolumeclaims", ("get",), "all pods that serve a model from a claim run on one node"),
    Right("", "persistentvolumeclaims", ("create",), "`snapshots.claim` fails: use a claim that already exists"),
    Right(
        "apps",
        "deployments",
        ("create", "get", "patch"),
        "`tensorboard: true` and `paceline serve --on kubernetes` fail",
    ),
    *(
        Right(group, resource, verbs, "`paceline serve --on kubernetes` fails")
        for group, resource, verbs in (
            ("apps", "deployments", ("delete",)),
            ("", "configmaps", ("list", "patch", "delete")),
            ("", "services", ("get", "patch")),
            ("networking.k8s.io", "networkpolicies", ("patch",)),
        )
    ),
    Right("networking.k8s.io", "ingresses", ("create",), "`tensorboard.ingress` fails"),
    Right("", "services", ("get",), "Paceline cannot print the port or address of `tensorboard.service`"),
    Right("", "pods/portforward", ("create", "get"), "`paceline tensorboard` cannot forward a port to the cluster"),
)


def missing(cluster: Cluster) -> Iterator[tuple[Right, list[str]]]:
    """Each permission with the verbs that the user lacks."""
    _is_allowed(cluster, RIGHTS[0], "create")  # lightkube's decoder crashes if two threads are first to decode a type
    with ThreadPoolExecutor(PARALLEL_REVIEWS) as pool:
        reviews = {right: [pool.submit(_is_allowed, cluster, right, v) for v in right.verbs] for right in RIGHTS}
        for right, answers in reviews.items():
            yield right, [verb for verb, answer in zip(right.verbs, answers, strict=True) if not answer.result()]


def _is_allowed(cluster: Cluster, right: Right, verb: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = models.ResourceAttributes(
        group=right.group, resource=resource, subresource=subresource, verb=verb, namespace=cluster.namespace
    )
    review = SelfSubjectAccessReview(spec=models.SelfSubjectAccessReviewSpec(resourceAttributes=attributes))
    answer = cluster.request("check your permissions", lambda: cluster.client.create(review))
    return bool(answer.status and answer.status.allowed)
