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
    over, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    return {
        "weights": jax.device_put(np.arange(48, dtype="float32").reshape(12, 4), over),
        "kinds": (
            jax.device_put(np.linspace(0, 1, 12).astype(jnp.bfloat16), over),
            jax.device_put(np.linspace(0, 1, 5).astype(jnp.float8_e4m3fn), everywhere),
            jax.device_put(np.arange(4).astype(jnp.int4), everywhere),
        ),
        "key": jax.jit(lambda: jax.random.key(7), out_shardings=everywhere)(),
        "keys": jax.jit(lambda: jax.random.split(jax.random.key(8, impl="rbg"), 12), out_shardings=over)(),
        "local": jnp.asarray(3),
        "numpy": [np.arange(3), np.float32(0.1)],
        "plain": {"epoch": 0, "rate": 0.1, "name": "x", "on": True},
    }


def whole(state: Any) -> Any:
    """All of it, as plain lists; gathered from all processes."""

    def one(value: Any) -> Any:
        if isinstance(value, (int, float, str)) and not isinstance(value, np.generic):
            return value
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            everywhere = NamedSharding(value.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
            value = jax.jit(lambda x: x, out_shardings=everywhere)(value)
            value = value.addressable_data(0)
        value = np.asarray(value)
        return [value.dtype.name, list(value.shape), value.tobytes().hex()]

    return [one(leaf) for leaf in jax.tree_util.tree_leaves(state)]


def task(rank: int, world: int, place: Path | None, options: dict[str, Any]) -> Any:
    if place is None:
        jax.distributed.initialize()
    elif world > 1:
        jax.distributed.initialize(f"127.0.0.1:{options['port']}", world, rank)
    hold = groups.Held()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    for seed in (random.seed, np.random.seed):
        seed(50 + rank)

    def update(state: dict[str, Any], batch: jax.Array) -> dict[str, Any]:
        key, now = jax.random.split(state["key"])
        pull = batch.mean() / 40 - state["weights"].mean()  # of all processes
        weights = state["weights"] + jax.random.normal(now, state["weights"].shape) * pull
        return {**state, "weights": weights, "key": key, "local": state["local"] + 1}

    names = ("weights", "key", "local")
    jitted = jax.jit(update, donate_argnums=0)  # its memory is used again at once
    order = Shards(40, 4, seed=1)
    told: dict[str, Any] = {"states": {}, "seen": {}}
    with Snapshots(every=options.get("every"), order=order) as snapshots:
        state, n = snapshots.restore(first_state(mesh))
        told["start"], told["restored"] = n, whole(state)
        told["shards"] = [list(shard.data.shape) for shard in state["weights"].addressable_shards]
        while n < options["steps"]:
            for share in order:
                if n + 1 == options.get("hold") and rank == 0:
                    hold.go.clear()
                examples = np.array(share, "float32")
                batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), examples)
                moved = jitted({name: state[name] for name in names}, batch)
                state = {**state, **moved, "plain": {**state["plain"], "epoch": order.epoch}}
                n += 1
                told["seen"][n] = [*share, random.random(), float(np.random.rand())]
                if place is not None:
                    told["states"][n] = whole(state)
                snapshots.step(n, state, loss=jnp.float32(n))
                report(step=n)
                print(f"step {n}", flush=True)
                time.sleep(options.get("pace", 0))
                if n == options.get("go"):
                    hold.go.set()
                    snapshots._background.settle()
                if n == options["steps"]:
                    break
        if "last" in options:
            snapshots.save(n, state)
    told["skipped"] = snapshots.skipped
    told["ended"] = [whole(state), order.state(), random.random(), float(np.random.rand())]
    return told


if __name__ == "__main__":
    groups.run(task)
