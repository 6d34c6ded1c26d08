"""What Paceline asks of a cluster, as rights of the person in one namespace."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightkube.models import authorization_v1 as models
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

from paceline.backends.kubernetes.cluster import Cluster

AT_ONCE = 8


@dataclass(frozen=True)
class Right:
    """Some verbs on one resource."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    without: str = ""  # what is lost without them; empty: no run is possible

    @property
    def as_kubectl_has_it(self) -> str:
        """
        >>> Right("batch", "jobs", ()).as_kubectl_has_it
        'jobs.batch'
        """
        return f"{self.resource}.{self.group}" if self.group else self.resource


RIGHTS = (
    Right("batch", "jobs", ("create", "get", "list", "watch", "patch", "delete")),
    Right("", "pods", ("list", "watch", "delete")),
    Right("", "pods", ("patch",), "a captain on a lost node comes back only when the cluster removes the node"),
    Right("", "pods/log", ("get",)),
    Right("", "services", ("create",)),
    Right("", "configmaps", ("create", "get")),
    Right("", "secrets", ("create",)),
    Right("networking.k8s.io", "networkpolicies", ("create",)),
    # A websocket is opened by GET: before 1.35 that alone is what a server asks for, and since then `create` too.
    Right(
        "",
        "pods/exec",
        ("create", "get"),
        "`paceline stop` ends the pods instead of asking the captain, and snapshots in pods and claims cannot be read",
    ),
    Right("", "events", ("list", "watch"), "why a pod cannot be made, or a volume cannot be mounted, is not said"),
    Right("", "persistentvolumeclaims", ("get",), "pods that serve a model and mount a claim are all on one node"),
    Right("", "persistentvolumeclaims", ("create",), "`snapshots.claim` is refused: name one that is there already"),
    Right(
        "apps",
        "deployments",
        ("create", "get", "patch"),
        "`tensorboard: true` and `paceline serve --on kubernetes` are refused",
    ),
    *(
        Right(group, resource, verbs, "`paceline serve --on kubernetes` is refused")
        for group, resource, verbs in (
            ("apps", "deployments", ("delete",)),
            ("", "configmaps", ("list", "patch", "delete")),
            ("", "services", ("get", "patch")),
            ("networking.k8s.io", "networkpolicies", ("patch",)),
        )
    ),
    Right("networking.k8s.io", "ingresses", ("create",), "`tensorboard.ingress` is refused"),
    Right("", "services", ("get",), "the port or address that `tensorboard.service` has been given is not said"),
    Right("", "pods/portforward", ("create", "get"), "`paceline tensorboard` opens no port to the cluster"),
)


def missing(cluster: Cluster) -> Iterator[tuple[Right, list[str]]]:
    """Each of them with the verbs that the person does not have."""
    _may(cluster, RIGHTS[0], "create")  # alone: lightkube's decoder crashes where two threads meet a type first
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {right: [pool.submit(_may, cluster, right, verb) for verb in right.verbs] for right in RIGHTS}
        for right, answers in asked.items():
            yield right, [verb for verb, answer in zip(right.verbs, answers, strict=True) if not answer.result()]


def _may(cluster: Cluster, right: Right, verb: str) -> bool:
    resource, _, below = right.resource.partition("/")
    about = models.ResourceAttributes(
        group=right.group, resource=resource, subresource=below, verb=verb, namespace=cluster.namespace
    )
    review = SelfSubjectAccessReview(spec=models.SelfSubjectAccessReviewSpec(resourceAttributes=about))
    answer = cluster.ask("ask for your rights", lambda: cluster.client.create(review))
    return bool(answer.status and answer.status.allowed)
