"""The random state of a process as plain data: Python's, numpy's, and what TensorFlow lets one have of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops


def now() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
    }
    seeds = _seeds()
    if seeds is not None:
        state["tensorflow"] = seeds.getstate()
    generator = stateful_random_ops.global_generator  # tf.random.get_global_generator would make one
    if generator is not None:
        state["generator"] = {"algorithm": int(generator.algorithm), "state": generator.state.numpy().tolist()}
    return state


def load(state: dict[str, Any]) -> None:
    random.setstate(_python(state["python"]))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    seeds = _seeds()
    if seeds is not None and "tensorflow" in state:
        seeds.setstate(_python(state["tensorflow"]))
    if "generator" in state:
        values, algorithm = state["generator"]["state"], state["generator"]["algorithm"]
        if stateful_random_ops.global_generator is None:
            tf.random.set_global_generator(tf.random.Generator.from_state(values, algorithm))
        else:
            stateful_random_ops.global_generator.reset(tf.constant(values, tf.int64))


def _seeds() -> random.Random | None:
    """From here ops outside of a tf.function get their seeds, once tf.random.set_seed was called."""
    seeds = getattr(context.context(), "_rng", None)
    return seeds if isinstance(seeds, random.Random) else None


def _python(state: Any) -> tuple[Any, ...]:
    version, internal, gauss = state
    return version, tuple(internal), gauss
