"""docs/kubernetes.md, followed word by word by somebody with a kubeconfig."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.environment import without
from support.lab.cluster import Cluster
from support.pages import ON_A_CLUSTER, follow, new_reader
from support.people import SOURCE

pytestmark = pytest.mark.timeout(300, func_only=True)

# Commands that are not run, and who runs them instead.
EXCEPTIONS = {"make cluster": "test_lab.py brings up a cluster as it does"}


def test_the_page_about_clusters_does_what_it_says(cluster: Cluster, tmp_path: Path) -> None:
    kept = without("PACELINE", "KUBE")
    kubectl = cluster.parts.program("kubectl")
    given = {"PATH": f"{kubectl.parent}:{kept['PATH']}", "KUBECONFIG": str(cluster.kubeconfig()), "HOME": str(tmp_path)}
    given |= {"PACELINE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(SOURCE)}
    reader = new_reader(tmp_path, {**kept, **given})
    try:
        follow(ON_A_CLUSTER, reader, EXCEPTIONS)
    finally:
        cluster.kubectl("delete", "namespace", "team-a", "--ignore-not-found", "--timeout=2m")
