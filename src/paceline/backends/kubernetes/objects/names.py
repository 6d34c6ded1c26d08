"""Names of the objects of a run: DNS labels that are never truncated, however long the job's name is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.plan import TENSORBOARD, Host, Plan

RUN_LABEL = "paceline.dev/run"
ROLE_LABEL = "paceline.dev/role"
SUBMISSION = "paceline.dev/submission"  # annotation of the captain's Job: which submission has created it
SERVE = "serve"
CAPTAIN_PORT = 7733
FILES_PORT = 7734  # port of TensorBoard's pod, for the members
SERVES_LABEL = "paceline.dev/serves"  # label of objects that serve a run's model: they do not belong to the run
TEMPLATE_LABEL = "paceline.dev/template"  # label of their pods: distinguishes the pods of an update from earlier ones
REST_PORT, GRPC_PORT = 8501, 8500  # the ports of TensorFlow Serving
METRICS_PORT = 7736  # port of the captain's pod, for Prometheus
SNAPSHOTS_PORT = 7735  # port of the captain's pod, for the members, if the captain stores the snapshots


@dataclass(frozen=True)
class HostPool:
    """Hosts of one role with the same resources: one Indexed Job."""

    role: str
    number: int
    hosts: tuple[Host, ...]

    @property
    def first(self) -> int:
        """The index of its first host among all hosts of the role."""
        return self.hosts[0].index


def pools(plan: Plan) -> Iterator[HostPool]:
    hosts_by_pool: dict[tuple[str, int], list[Host]] = {}
    for host in plan.hosts:
        hosts_by_pool.setdefault((host.role, host.group), []).append(host)
    for (role, number), hosts in hosts_by_pool.items():
        yield HostPool(role, number, tuple(hosts))


def job_of(run: str, pool: HostPool) -> str:
    """
    >>> job_of("digits-3f9a", HostPool("worker", 0, ()))
    'digits-3f9a-worker'
    >>> job_of("digits-3f9a", HostPool("worker", 1, ()))
    'digits-3f9a-worker-g1'
    """
    return f"{run}-{pool.role}" if pool.number == 0 else f"{run}-{pool.role}-g{pool.number}"


def captain_address(run: str) -> str:
    """The captain's Job and the Service have the run's name; pods of an Indexed Job are named by their index.

    >>> captain_address("digits-3f9a")
    'digits-3f9a-0.digits-3f9a:7733'
    """
    return f"{captain_host(run)}:{CAPTAIN_PORT}"


def captain_host(run: str) -> str:
    return f"{run}-0.{run}"


def board(run: str) -> str:
    """The name of TensorBoard's Deployment and Service.

    >>> board("digits-3f9a")
    'digits-3f9a-tensorboard'
    """
    return f"{run}-{TENSORBOARD}"


def page(run: str) -> str:
    """The name of the Service and the Ingress that publish TensorBoard.

    >>> page("digits-3f9a")
    'digits-3f9a-tensorboard-page'
    """
    return f"{board(run)}-page"


def metrics(run: str) -> str:
    """The name of the NetworkPolicy and the PodMonitor for the captain's metrics.

    >>> metrics("digits-3f9a")
    'digits-3f9a-metrics'
    """
    return f"{run}-metrics"


def server(run: str) -> str:
    """The name of the Deployment and the Service that serve the run's model.

    >>> server("digits-3f9a")
    'digits-3f9a-serve'
    """
    return f"{run}-{SERVE}"


def labels(run: str, job: str, role: str = "") -> dict[str, str]:
    return {
        "app.kubernetes.io/name": job,
        "app.kubernetes.io/instance": run,
        "app.kubernetes.io/managed-by": "paceline",
        RUN_LABEL: run,
        **({"app.kubernetes.io/component": role, ROLE_LABEL: role} if role else {}),
    }


def server_labels(run: str, job: str) -> dict[str, str]:
    """Without the run's own label: queries for the run's objects must not find these."""
    common = labels(run, job)
    del common[RUN_LABEL]
    return {**common, "app.kubernetes.io/component": SERVE, SERVES_LABEL: run}
