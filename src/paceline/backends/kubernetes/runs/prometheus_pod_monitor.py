"""Creates the PodMonitor of a run, by which the Prometheus Operator finds its metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx2

from paceline.backends.kubernetes.api import raw_requests
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.objects.run_objects import pod_monitor
from paceline.plan import Plan

TIMEOUT_S = 10.0
FORBIDDEN, NOT_FOUND = 403, 404
_OTHERWISE = "Prometheus finds the captain only if it reads the annotations prometheus.io/scrape, port and path of pods"


def create(cluster: Cluster, plan: Plan, run: str, owner: dict[str, Any]) -> str:
    """Returns why there is none; empty: it was created."""
    monitor = pod_monitor(plan, run)
    monitor["metadata"] = {**monitor["metadata"], "ownerReferences": [owner]}
    group = f"/apis/{monitor['apiVersion']}"
    with raw_requests.client(cluster, TIMEOUT_S) as client:
        known: httpx2.Response = cluster.request("read the API groups", partial(client.get, group))
        if known.status_code == NOT_FOUND:  # a user without permission would not learn this from the next request
            return f"this cluster has no PodMonitor (no Prometheus Operator): {_OTHERWISE}"
        request = partial(client.post, f"{group}/namespaces/{cluster.namespace}/podmonitors", json=monitor)
        created: httpx2.Response = cluster.request("create the PodMonitor", request)
    if created.is_success:
        return ""
    reason = f"the PodMonitor was refused (HTTP {created.status_code})"
    if created.status_code == FORBIDDEN:
        reason = f"you have no permission to create podmonitors.monitoring.coreos.com in {cluster.namespace}"
    return f"{reason}: {_OTHERWISE}"
