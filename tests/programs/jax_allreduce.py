"""A JAX program for several processes that calls initialize() without arguments; it does not use Paceline."""

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
    options = parser.parse_args()

    jax.distributed.initialize()
    rank, size = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_devices, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    truth = np.random.default_rng(7).normal(size=(FEATURES, 1)).astype("float32")

    start, weights = 0, np.zeros((FEATURES, 1), "float32")
    checkpoint = options.checkpoint_dir / "state.npz" if options.checkpoint_dir else None
    if checkpoint and checkpoint.exists():
        with np.load(checkpoint) as state:
            start, weights = int(state["step"]), state["weights"]
    weights = jax.make_array_from_process_local_data(replicated, weights)

    def loss(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.mean((inputs @ weights - inputs @ truth) ** 2)

    # The inputs are sharded over all devices and the result is replicated, so XLA adds the all-reduce.
    @jax.jit(out_shardings=replicated)
    def train_step(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, inputs)

    print(f"start {start}", flush=True)
    for step in range(start, options.steps):
        faults.before_step(step + 1, rank, options)
        batch = np.random.default_rng(step).normal(size=(BATCH, FEATURES)).astype("float32")
        part = BATCH // size
        inputs = jax.make_array_from_process_local_data(over_devices, batch[rank * part : (rank + 1) * part])
        weights = train_step(weights, inputs)
        weights.block_until_ready()
        print(f"step {step + 1}", flush=True)
        if checkpoint and rank == 0:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            partial = checkpoint.with_suffix(".partial.npz")
            np.savez(partial, step=step + 1, weights=np.asarray(weights))
            partial.replace(checkpoint)
        time.sleep(options.sleep)

    print(f"rank {rank} of {size}, {jax.device_count()} devices")
    print(f"error {np.abs(np.asarray(weights) - truth).max():.6f}")
    print(f"weights {hashlib.sha256(np.asarray(weights).tobytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
