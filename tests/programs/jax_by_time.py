"""Trains with JAX on several processes, which save their shards of the state by time, until the step in a file."""

import os
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paceline.jax import Snapshots

jax.distributed.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
weights = jax.device_put(np.zeros(8, "float32"), sharding)
finish, stopping = Path(os.environ["FINISH"]), []
with Snapshots(every=os.environ["EVERY"]) as snapshots:
    weights, step = snapshots.restore(weights)
    while not finish.exists() or step < int(finish.read_text()):
        step += 1
        if snapshots.step(step, weights):
            stopping.append(step)
        time.sleep(0.01)
print(f"stopping {stopping}", flush=True)
