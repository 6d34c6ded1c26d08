"""Computes with a framework and reports steps until a file exists: `profiled.py FRAMEWORK FILE`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline

framework, end = sys.argv[1:3]


def torch_step() -> Callable[[], Any]:
    import torch

    weights = torch.ones(16, 16)
    return lambda: weights.matmul(weights).sum().item()


def tensorflow_step() -> Callable[[], Any]:
    import tensorflow as tf

    weights = tf.ones((16, 16))
    return lambda: tf.reduce_sum(tf.matmul(weights, weights)).numpy()


def jax_step() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda weights: (weights @ weights).sum())
    return lambda: product(jnp.ones((16, 16))).block_until_ready()


compute = {"torch": torch_step, "tensorflow": tensorflow_step, "jax": jax_step, "silent": lambda: int}[framework]()
step = 0
while not Path(end).exists():
    compute()
    step += 1
    if framework != "silent":
        paceline.report(step=step)
    if "save" in sys.argv:
        paceline.should_save(step)
    time.sleep(0.02)
