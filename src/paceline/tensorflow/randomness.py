"""The random state of a process as plain data: Python's, numpy's, and the accessible part of TensorFlow's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops


def state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    current: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
    }
    seeds = _seeds()
    if seeds is not None:
        current["tensorflow"] = seeds.getstate()
    generator = stateful_random_ops.global_generator  # tf.random.get_global_generator would create one
    if generator is not None:
        current["generator"] = {"algorithm": int(generator.algorithm), "state": generator.state.numpy().tolist()}
    return current


def load(saved: dict[str, Any]) -> None:
    random.setstate(_from_json(saved["python"]))
    kind, keys, position, has_gauss, gauss = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    seeds = _seeds()
    if seeds is not None and "tensorflow" in saved:
        seeds.setstate(_from_json(saved["tensorflow"]))
    if "generator" in saved:
        values, algorithm = saved["generator"]["state"], saved["generator"]["algorithm"]
        if stateful_random_ops.global_generator is None:
            tf.random.set_global_generator(tf.random.Generator.from_state(values, algorithm))
        else:
            stateful_random_ops.global_generator.reset(tf.constant(values, tf.int64))


def _seeds() -> random.Random | None:
    """The source of seeds for ops outside of a tf.function, once tf.random.set_seed was called."""
    seeds = getattr(context.context(), "_rng", None)
    return seeds if isinstance(seeds, random.Random) else None


def _from_json(saved: Any) -> tuple[Any, ...]:
    version, internal, gauss = saved
    return version, tuple(internal), gauss
