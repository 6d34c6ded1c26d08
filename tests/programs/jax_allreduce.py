"""A JAX program for several processes that calls initialize() without arguments; it knows nothing of Paceline."""

import argparse
import hashlib
import time
from pathlib import Path

import faults
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH = 32
FEATURES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=0, help="seconds a step")
    parser.add_argument("--checkpoint-dir", type=Path)
    faults.add_options(parser)
    given = parser.parse_args()

    jax.distributed.initialize()
    rank, size = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_devices, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    truth = np.random.default_rng(7).normal(size=(FEATURES, 1)).astype("float32")

    start, weights = 0, np.zeros((FEATURES, 1), "float32")
    saved = given.checkpoint_dir / "state.npz" if given.checkpoint_dir else None
    if saved and saved.exists():
        with np.load(saved) as state:
            start, weights = int(state["step"]), state["weights"]
    weights = jax.make_array_from_process_local_data(everywhere, weights)

    def loss(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.mean((inputs @ weights - inputs @ truth) ** 2)

    # The inputs lie on all devices and the result has to be everywhere, so XLA adds the all-reduce.
    @jax.jit(out_shardings=everywhere)
    def train_step(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, inputs)

    print(f"start {start}", flush=True)
    for step in range(start, given.steps):
        faults.before_step(step + 1, rank, given)
        batch = np.random.default_rng(step).normal(size=(BATCH, FEATURES)).astype("float32")
        part = BATCH // size
        inputs = jax.make_array_from_process_local_data(over_devices, batch[rank * part : (rank + 1) * part])
        weights = train_step(weights, inputs)
        weights.block_until_ready()
        print(f"step {step + 1}", flush=True)
        if saved and rank == 0:
            saved.parent.mkdir(parents=True, exist_ok=True)
            partial = saved.with_suffix(".partial.npz")
            np.savez(partial, step=step + 1, weights=np.asarray(weights))
            partial.replace(saved)
        time.sleep(given.sleep)

    print(f"rank {rank} of {size}, {jax.device_count()} devices")
    print(f"error {np.abs(np.asarray(weights) - truth).max():.6f}")
    print(f"weights {hashlib.sha256(np.asarray(weights).tobytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
