"""The runs of clusters: each cluster is asked in a thread of its own, as its login may block, with a time limit."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.client import run_listing
from paceline.client.contexts import known_contexts
from paceline.client.reading.find_run import Target, refresh
from paceline.errors import PacelineError
from paceline.page.http.errors import NotFound, TimeLimit
from paceline.page.http.responses import error_fields
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run

LIMIT_S = 60.0
_AGAIN_S = 15.0  # after a success
_AFTER_FAILURE_S = 120.0
_NO_RESPONSE = TimeLimit(f"no response within {LIMIT_S:g} s", remedy="log in to the cluster, then try again")

ClusterName = tuple[str, str | None]  # context and namespace


@dataclass
class Cluster:
    """What is known of a cluster. Its fields are replaced, never changed in place."""

    context: str
    namespace: str | None
    is_current: bool
    state: str = "idle"  # idle, asking, listed, failed
    error: dict[str, Any] | None = None
    at: float | None = None  # when it was listed, in seconds since 1970
    reports: list[dict[str, Any]] = field(default_factory=list)
    wanted: bool = False  # the user has asked for it, or a run of this machine is there
    began: float = 0.0
    ended: float = 0.0
    is_working: bool = False  # a thread works, even after its time limit

    @property
    def code(self) -> str:
        """Tells runs with the same id on different clusters apart, in addresses."""
        return hashlib.sha256(f"{self.context}\0{self.namespace or ''}".encode()).hexdigest()[:10]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": "context", "name": self.context, "namespace": self.namespace, "is_current": self.is_current,
            "state": self.state, "error": self.error, "at": self.at, "runs": len(self.reports),
        }  # fmt: skip


class Clusters:
    """Those of the kubeconfig, and those that the runs of this machine are on."""

    def __init__(
        self, contexts: Callable[[], list[Any]] = known_contexts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._contexts, self._clock = contexts, clock
        self._clusters: dict[ClusterName, Cluster] | None = None

    def all(self) -> list[Cluster]:
        with self._lock:
            return list(self._load().values())

    def by_code(self, code: str) -> Cluster:
        for cluster in self.all():
            if cluster.code == code:
                return cluster
        raise NotFound("no such cluster", remedy="reload the list of runs")

    def ask(self, context: str, namespace: str | None) -> Cluster:
        """At the request of the user. NotFound: the kubeconfig has no such context."""
        with self._lock:
            clusters = self._load()
            same_context = [each for each in clusters.values() if each.context == context]
            if not same_context:
                raise NotFound(f"the kubeconfig has no context {context!r}")
            cluster = clusters.get((context, namespace)) if namespace else same_context[0]
            if cluster is None:
                cluster = clusters[context, namespace] = Cluster(context, namespace, False)
            cluster.wanted = True
            self._start(cluster, [])
            return cluster

    def look(self, runs: Iterable[Run]) -> None:
        """Asks the current context, and those of these runs, which have not ended, if that was long ago."""
        live: dict[ClusterName, list[Run]] = {}
        for run in runs:
            try:
                context, namespace = run_folders.cluster_of(run.folder)
            except PacelineError:
                continue
            live.setdefault((context or "", namespace), []).append(run)
        now = self._clock()
        with self._lock:
            clusters = self._load()
            for name in live:
                if name not in clusters:
                    clusters[name] = Cluster(*name, False)
            for name, cluster in clusters.items():
                is_late = cluster.is_working and cluster.state == "asking" and now - cluster.began > LIMIT_S
                if is_late:
                    error = TimeLimit(
                        f"no response within {LIMIT_S:g} s", remedy="log in to the cluster, then try again"
                    )
                    cluster.state, cluster.error = "failed", error_fields(error)
                pause = _AFTER_FAILURE_S if cluster.state == "failed" else _AGAIN_S
                is_due = cluster.state == "idle" or now - cluster.ended > pause
                if (cluster.wanted or cluster.is_current or name in live) and is_due:
                    self._start(cluster, live.get(name, []))

    def _load(self) -> dict[ClusterName, Cluster]:
        if self._clusters is None:
            self._clusters = {
                (each.name, each.namespace): Cluster(each.name, each.namespace, each.is_current)
                for each in self._contexts()
            }
        return self._clusters

    def _start(self, cluster: Cluster, runs: list[Run]) -> None:
        if cluster.is_working:
            return  # its login still blocks
        cluster.is_working, cluster.began = True, self._clock()
        cluster.state = "listed" if cluster.state == "listed" else "asking"
        threading.Thread(target=self._work, args=(cluster, runs), daemon=True).start()

    def _work(self, cluster: Cluster, runs: list[Run]) -> None:
        target = Target("kubernetes", cluster.context or None, cluster.namespace)
        try:
            reports = run_listing.on_cluster(target)
            for run in runs:
                refresh(run)
            with self._lock:
                cluster.reports, cluster.at, cluster.state, cluster.error = reports, time.time(), "listed", None
        except PacelineError as error:
            self._fail(cluster, error)
        except Exception as error:
            self._fail(cluster, PacelineError(f"cannot list its runs: {type(error).__name__}: {error}"))
        finally:
            with self._lock:
                cluster.is_working, cluster.ended = False, self._clock()

    def _fail(self, cluster: Cluster, error: PacelineError) -> None:
        with self._lock:
            cluster.state, cluster.error = "failed", error_fields(error)
