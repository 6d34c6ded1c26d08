"""A JAX program for several processes: a recurrent network, unrolled, whose step takes long to compile; with stamps."""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import stamps
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paceline

WIDTH, BATCH = 8, 4

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds between two steps")
parser.add_argument("--length", type=int, default=1, help="of the sequences; compile time is proportional to it")
args = parser.parse_args()

if "BENCH_COORDINATOR" in os.environ:  # started by launch.py
    coordinator = os.environ["BENCH_COORDINATOR"]
    jax.distributed.initialize(coordinator, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
else:
    jax.distributed.initialize()
rank, count = jax.process_index(), jax.process_count()
mesh = Mesh(np.array(jax.devices()), ("data",))
over_devices, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


@jax.jit  # traced once; XLA compiles it for each call
def cell(state: jax.Array, weights: jax.Array, inputs: jax.Array) -> jax.Array:
    enter, forget, leave, new = jnp.split(state @ weights + inputs, 4, -1)
    state = jax.nn.sigmoid(forget) * state + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jnp.tanh(state) * jax.nn.sigmoid(leave)


def loss(weights: jax.Array, sequences: jax.Array) -> jax.Array:
    state = jnp.zeros((count * BATCH, WIDTH))
    for number in range(args.length):
        state = cell(state, weights, sequences[:, number])
    return jnp.mean((state - 0.5) ** 2)


@jax.jit(out_shardings=replicated)
def train_step(weights: jax.Array, sequences: jax.Array) -> jax.Array:
    return weights - 0.01 * jax.grad(loss)(weights, sequences)


start = (0.1 * np.random.default_rng(7).normal(size=(WIDTH, 4 * WIDTH))).astype("float32")
weights = jax.make_array_from_process_local_data(replicated, start)
own = np.random.default_rng(rank).normal(size=(BATCH, args.length, 4 * WIDTH)).astype("float32")
sequences = jax.make_array_from_process_local_data(over_devices, own)

before = stamps.last_step(rank)
for step in range(before + 1, before + args.steps + 1):
    weights = train_step(weights, sequences)
    weights.block_until_ready()
    stamps.stamp(rank, step)
    paceline.report(step=step)
    time.sleep(args.sleep)
