"""Who takes a snapshot together: every worker of a MultiWorkerMirroredStrategy, or one process alone."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import tensorflow as tf

_ROOM = 32 * 1024  # bytes of the JSON of one process: three states of 625 numbers


class Group:
    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.together = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.rank = int(os.environ.get("PACELINE_RANK") or "0")
        if self.together:
            self.rank = _worker(strategy.cluster_resolver)
        elif isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
            self.rank = 0  # the coordinator, whatever its number among the tasks
        self._add = tf.function(lambda number: strategy.run(_sum_of_first, (number,)), autograph=False)
        self._gather = tf.function(lambda words: strategy.run(_all_of, (words,)), autograph=False)

    @property
    def chief(self) -> bool:
        return self.rank == 0

    def chiefs(self, number: int) -> int:
        """What the chief says, in every member; each has to ask at the same step."""
        if not self.together:
            return number
        return int(self._local(self._add(tf.constant(number, tf.float32))))

    def all(self, mine: Any) -> list[Any]:
        """What every member has to say, as plain data, by rank."""
        if not self.together:
            return [mine]
        words = json.dumps(mine).encode()
        if len(words) > _ROOM:
            raise ValueError(f"{len(words)} bytes, and there is room for {_ROOM}")
        # As float32: the one type that every way to communicate has.
        numbers = np.frombuffer(words.ljust(_ROOM), np.uint8).astype(np.float32)
        rows = self._local(self._gather(tf.constant(numbers))).numpy().astype(np.uint8)
        replicas = self._strategy.num_replicas_in_sync // _workers(self._strategy.cluster_resolver)
        return [json.loads(row.tobytes()) for row in rows[::replicas]]

    def _local(self, result: Any) -> Any:
        return self._strategy.experimental_local_results(result)[0]


def _sum_of_first(number: Any) -> Any:
    replica = tf.distribute.get_replica_context()
    first = tf.cast(tf.equal(replica.replica_id_in_sync_group, 0), number.dtype)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, number * first)


def _all_of(numbers: Any) -> Any:
    return tf.distribute.get_replica_context().all_gather(numbers[tf.newaxis], axis=0)


def _workers(resolver: Any) -> int:
    jobs = resolver.cluster_spec().as_dict() if resolver.cluster_spec() else {}
    return max(1, len(jobs.get("chief", [])) + len(jobs.get("worker", [])))


def _worker(resolver: Any) -> int:
    """The number of this worker, counted as the strategy does: the chief first, where there is one."""
    if not resolver.cluster_spec() or resolver.task_type in (None, "chief"):
        return 0
    return int(resolver.task_id) + len(resolver.cluster_spec().as_dict().get("chief", []))
