"""Clients for requests that lightkube does not support, with the same kubeconfig: plain paths and websockets."""

from __future__ import annotations

import httpx2
from lightkube.config.client_adapter import AsyncClient, Client, ConnectionParams

from paceline.backends.kubernetes.api.cluster import Cluster


def client(cluster: Cluster, timeout: float) -> httpx2.Client:
    return Client(cluster.client.config, ConnectionParams(timeout=httpx2.Timeout(timeout)))


def async_client(cluster: Cluster, timeout: float) -> httpx2.AsyncClient:
    return AsyncClient(cluster.client.config, ConnectionParams(timeout=httpx2.Timeout(timeout)))
