"""Tells JAX about the run: a ClusterEnv ahead of JAX's own, so that jax.distributed.initialize() needs no arguments."""

import os
import sys

NEEDED = ("PACELINE_JAX_COORDINATOR", "PACELINE_RANK", "PACELINE_WORLD_SIZE")
MODULE = "jax._src.clusters"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def register(clusters: "Any") -> None:
    """Called with jax._src.clusters once it is imported. A JAX that has changed too much is left alone, in words."""
    try:
        _register(clusters.ClusterEnv)
    except Exception as error:
        print(f"paceline: cannot tell JAX about this run ({error!r}); give initialize() its arguments", file=sys.stderr)


def _register(base: "Any") -> None:
    types = base._cluster_types
    if any(cluster.name == "paceline" for cluster in types):
        return

    class PacelineCluster(base):  # type: ignore[misc]
        name = "paceline"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(os.environ.get(name) for name in NEEDED)

        @classmethod
        def get_coordinator_address(cls, *_: "Any", **__: "Any") -> str:
            return os.environ["PACELINE_JAX_COORDINATOR"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["PACELINE_WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["PACELINE_RANK"])

        @classmethod
        def get_local_process_id(cls) -> "int | None":
            # One device a process; a process alone on its host keeps all of them.
            alone = os.environ.get("PACELINE_LOCAL_WORLD_SIZE") == "1"
            index = os.environ.get("PACELINE_LOCAL_INDEX")
            return None if alone or not index else int(index)

    types.remove(PacelineCluster)
    types.insert(0, PacelineCluster)
