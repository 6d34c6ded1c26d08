"""docs/kubernetes.md: its commands are run exactly as written, by a user with a kubeconfig."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.environment import without
from support.lab.cluster import Cluster
from support.pages import ON_A_CLUSTER, follow, new_reader
from support.people import SOURCE

pytestmark = pytest.mark.timeout(900, func_only=True)

# Commands that are not run here, and the tests that cover them.
EXCEPTIONS = {"make cluster": "test_lab.py starts a cluster the same way"}


def test_the_page_about_clusters_does_what_it_says(cluster: Cluster, tmp_path: Path) -> None:
    env = without("PACELINE", "KUBE")
    kubectl = cluster.parts.program("kubectl")
    settings = {
        "PATH": f"{kubectl.parent}:{env['PATH']}",
        "KUBECONFIG": str(cluster.kubeconfig()),
        "HOME": str(tmp_path),
    }
    settings |= {"PACELINE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(SOURCE)}
    reader = new_reader(tmp_path, {**env, **settings})
    try:
        follow(ON_A_CLUSTER, reader, EXCEPTIONS)
    finally:
        cluster.kubectl("delete", "namespace", "team-a", "--ignore-not-found", "--timeout=2m")
