"""Clients for requests that lightkube does not support, with the same kubeconfig: plain paths and websockets."""

from __future__ import annotations

import httpx2

from paceline.backends.kubernetes.api.cluster import Cluster


def client(cluster: Cluster, timeout: float) -> httpx2.Client:
    assert cluster.access is not None
    return httpx2.Client(base_url=cluster.server, transport=cluster.access.transport(), timeout=timeout)


def async_client(cluster: Cluster, timeout: float) -> httpx2.AsyncClient:
    assert cluster.access is not None
    return httpx2.AsyncClient(base_url=cluster.server, transport=cluster.access.async_transport(), timeout=timeout)
