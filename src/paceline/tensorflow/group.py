"""The processes that take a snapshot together: all workers of a MultiWorkerMirroredStrategy, or a single process."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import tensorflow as tf

_MESSAGE_SIZE = 32 * 1024  # bytes of the JSON of one process: three states of 625 numbers


class Group:
    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.collective = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.rank = int(os.environ.get("PACELINE_RANK") or "0")
        if self.collective:
            self.rank = _worker(strategy.cluster_resolver)
        elif isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
            self.rank = 0  # the coordinator, whatever its index among the tasks
        self._broadcast = tf.function(lambda number: strategy.run(_value_of_first, (number,)), autograph=False)
        self._gather = tf.function(lambda values: strategy.run(_gather_in_replica, (values,)), autograph=False)

    @property
    def chief(self) -> bool:
        return self.rank == 0

    def chief_value(self, number: int) -> int:
        """The chief's number, in every member; all of them must call it at the same step."""
        if not self.collective:
            return number
        return int(self._local(self._broadcast(tf.constant(number, tf.float32))))

    def gather(self, own_data: Any) -> list[Any]:
        """The plain data of every member, by rank; all of them must call it at the same step."""
        if not self.collective:
            return [own_data]
        message = json.dumps(own_data).encode()
        if len(message) > _MESSAGE_SIZE:
            raise ValueError(f"a message of {len(message)} bytes exceeds the limit of {_MESSAGE_SIZE} bytes")
        # As float32: the only type that every communication backend supports.
        numbers = np.frombuffer(message.ljust(_MESSAGE_SIZE), np.uint8).astype(np.float32)
        rows = self._local(self._gather(tf.constant(numbers))).numpy().astype(np.uint8)
        replicas = self._strategy.num_replicas_in_sync // _workers(self._strategy.cluster_resolver)
        return [json.loads(row.tobytes()) for row in rows[::replicas]]

    def _local(self, result: Any) -> Any:
        return self._strategy.experimental_local_results(result)[0]


def _value_of_first(number: Any) -> Any:
    replica = tf.distribute.get_replica_context()
    is_first = tf.cast(tf.equal(replica.replica_id_in_sync_group, 0), number.dtype)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, number * is_first)


def _gather_in_replica(numbers: Any) -> Any:
    return tf.distribute.get_replica_context().all_gather(numbers[tf.newaxis], axis=0)


def _workers(resolver: Any) -> int:
    jobs = resolver.cluster_spec().as_dict() if resolver.cluster_spec() else {}
    return max(1, len(jobs.get("chief", [])) + len(jobs.get("worker", [])))


def _worker(resolver: Any) -> int:
    """The index of this worker as the strategy counts: the chief first, if there is one."""
    if not resolver.cluster_spec() or resolver.task_type in (None, "chief"):
        return 0
    return int(resolver.task_id) + len(resolver.cluster_spec().as_dict().get("chief", []))
