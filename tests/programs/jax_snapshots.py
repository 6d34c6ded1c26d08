"""Trains with JAX on several processes and takes snapshots."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import groups
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paceline import Shards, report
from paceline.jax import Snapshots


def first_state(mesh: Mesh) -> dict[str, Any]:
    sharded, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    return {
        "weights": jax.device_put(np.arange(48, dtype="float32").reshape(12, 4), sharded),
        "kinds": (
            jax.device_put(np.linspace(0, 1, 12).astype(jnp.bfloat16), sharded),
            jax.device_put(np.linspace(0, 1, 5).astype(jnp.float8_e4m3fn), replicated),
            jax.device_put(np.arange(4).astype(jnp.int4), replicated),
        ),
        "key": jax.jit(lambda: jax.random.key(7), out_shardings=replicated)(),
        "keys": jax.jit(lambda: jax.random.split(jax.random.key(8, impl="rbg"), 12), out_shardings=sharded)(),
        "local": jnp.asarray(3),
        "numpy": [np.arange(3), np.float32(0.1)],
        "plain": {"epoch": 0, "rate": 0.1, "name": "x", "on": True},
    }


def whole(state: Any) -> Any:
    """The whole state as plain lists, gathered from all processes."""

    def convert(value: Any) -> Any:
        if isinstance(value, (int, float, str)) and not isinstance(value, np.generic):
            return value
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            replicated = NamedSharding(value.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
            value = jax.jit(lambda x: x, out_shardings=replicated)(value)
            value = value.addressable_data(0)
        value = np.asarray(value)
        return [value.dtype.name, list(value.shape), value.tobytes().hex()]

    return [convert(leaf) for leaf in jax.tree_util.tree_leaves(state)]


def task(rank: int, world: int, folder: Path | None, options: dict[str, Any]) -> Any:
    if folder is None:
        jax.distributed.initialize()
    elif world > 1:
        jax.distributed.initialize(f"127.0.0.1:{options['port']}", world, rank)
    gate = groups.WriteGate()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    for seed in (random.seed, np.random.seed):
        seed(50 + rank)

    def update(state: dict[str, Any], batch: jax.Array) -> dict[str, Any]:
        key, step_key = jax.random.split(state["key"])
        pull = batch.mean() / 40 - state["weights"].mean()  # over all processes
        weights = state["weights"] + jax.random.normal(step_key, state["weights"].shape) * pull
        return {**state, "weights": weights, "key": key, "local": state["local"] + 1}

    names = ("weights", "key", "local")
    jitted = jax.jit(update, donate_argnums=0)  # its memory is reused immediately
    order = Shards(40, 4, seed=1)
    result: dict[str, Any] = {"states": {}, "seen": {}}
    with Snapshots(every=options.get("every"), order=order) as snapshots:
        state, n = snapshots.restore(first_state(mesh))
        result["start"], result["restored"] = n, whole(state)
        result["shards"] = [list(shard.data.shape) for shard in state["weights"].addressable_shards]
        while n < options["steps"]:
            for share in order:
                if n + 1 == options.get("hold") and rank == 0:
                    gate.go.clear()
                examples = np.array(share, "float32")
                batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), examples)
                updated = jitted({name: state[name] for name in names}, batch)
                state = {**state, **updated, "plain": {**state["plain"], "epoch": order.epoch}}
                n += 1
                result["seen"][n] = [*share, random.random(), float(np.random.rand())]
                if folder is not None:
                    result["states"][n] = whole(state)
                snapshots.step(n, state, loss=jnp.float32(n))
                report(step=n)
                print(f"step {n}", flush=True)
                time.sleep(options.get("pace", 0))
                if n == options.get("go"):
                    gate.go.set()
                    snapshots._background.settle()
                if n == options["steps"]:
                    break
        if "last" in options:
            snapshots.save(n, state)
    result["skipped"] = snapshots.skipped
    result["ended"] = [whole(state), order.state(), random.random(), float(np.random.rand())]
    return result


if __name__ == "__main__":
    groups.run(task)
