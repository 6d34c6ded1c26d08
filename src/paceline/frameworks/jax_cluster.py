"""Registers a ClusterEnv for the run with JAX, so that jax.distributed.initialize() needs no arguments."""

import os
import sys

REQUIRED = ("PACELINE_JAX_COORDINATOR", "PACELINE_RANK", "PACELINE_WORLD_SIZE")
MODULE = "jax._src.clusters"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def register(clusters: "Any") -> None:
    """Called with jax._src.clusters after it is imported. An incompatible JAX is not changed, with a warning."""
    try:
        _register(clusters.ClusterEnv)
    except Exception as error:
        remedy = "pass its arguments to jax.distributed.initialize()"
        print(f"paceline: cannot register this run with JAX ({error!r}); {remedy}", file=sys.stderr)


def _register(base: "Any") -> None:
    types = base._cluster_types
    if any(cluster.name == "paceline" for cluster in types):
        return

    class PacelineCluster(base):  # type: ignore[misc]
        name = "paceline"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(os.environ.get(name) for name in REQUIRED)

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
            # One device per process, or all devices if the process is alone on its host.
            is_alone = os.environ.get("PACELINE_LOCAL_WORLD_SIZE") == "1"
            index = os.environ.get("PACELINE_LOCAL_INDEX")
            return None if is_alone or not index else int(index)

    types.remove(PacelineCluster)
    types.insert(0, PacelineCluster)
