"""A small model of each framework: trained with snapshots, tried, exported, and loaded again without the model's code.

models.py FRAMEWORK train NUMBER... | try NUMBER... | export | load FOLDER NUMBER...

All modes but export print the output of the model for the numbers.
"""

import json
import sys
from typing import Any

import numpy as np

FRAMEWORK, MODE, *ARGUMENTS = sys.argv[1:]
STEPS = 3


def batch(numbers: list[str]) -> Any:
    """One example for each number."""
    return np.array([[float(number) * scale for scale in (1.0, 0.5, -1.0)] for number in numbers], np.float32)


def show(values: Any) -> None:
    print(json.dumps(np.asarray(values).tolist()))


def tensorflow() -> None:
    import tensorflow as tf

    if MODE == "load":
        model = tf.saved_model.load(ARGUMENTS[0])
        show(model.signatures["serving_default"](image=batch(ARGUMENTS[1:]))["logits"])
        return
    import keras

    import paceline.tensorflow

    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), name="image")
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, activation="relu")(inputs))
    model = keras.Model(inputs, {"logits": keras.layers.Dense(2)(hidden)})
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    with paceline.tensorflow.Snapshots({"model": model, "optimizer": optimizer}) as snapshots:
        step = snapshots.restore()
        while MODE == "train" and step < STEPS:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(batch(["1", "2"]), training=True)["logits"] ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            step += 1
            snapshots.save(step, loss=loss)
    if MODE != "export":
        show(model(batch(ARGUMENTS), training=False)["logits"])
    else:
        paceline.tensorflow.export(model)


def torch() -> None:
    import torch

    import paceline.torch

    if MODE == "load":
        show(paceline.torch.load(ARGUMENTS[0])(image=torch.tensor(batch(ARGUMENTS[1:])))["logits"].detach())
        return

    class Model(torch.nn.Sequential):
        def forward(self, image: Any) -> Any:
            return {"logits": super().forward(image)}

    torch.manual_seed(1)
    model = Model(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with paceline.torch.Snapshots({"model": model, "optimizer": optimizer}) as snapshots:
        step = snapshots.restore()
        while MODE == "train" and step < STEPS:
            optimizer.zero_grad()
            loss = (model(torch.tensor(batch(["1", "2"])))["logits"] ** 2).mean()
            loss.backward()
            optimizer.step()
            step += 1
            snapshots.save(step, loss=loss)
    if MODE != "export":
        show(model.eval()(torch.tensor(batch(ARGUMENTS)))["logits"].detach())
    else:
        paceline.torch.export(model, torch.zeros(1, 3))
        assert model.training


def jax() -> None:
    import jax
    import jax.numpy as jnp

    import paceline.jax

    if MODE == "load":
        show(paceline.jax.load(ARGUMENTS[0])({"image": batch(ARGUMENTS[1:])})["logits"])
        return

    def predict(params: Any, image: Any) -> Any:
        hidden = jax.nn.relu(image @ params["first"])
        return {"logits": hidden @ params["last"].astype(jnp.float32)}

    first, last = jax.random.split(jax.random.key(1))
    params = {"first": jax.random.normal(first, (3, 4)), "last": jax.random.normal(last, (4, 2), jnp.bfloat16)}
    grad = jax.grad(lambda params: (predict(params, batch(["1", "2"]))["logits"] ** 2).mean())
    with paceline.jax.Snapshots() as snapshots:
        params, step = snapshots.restore(params)
        while MODE == "train" and step < STEPS:
            params = jax.tree.map(lambda value, slope: value - 0.1 * slope, params, grad(params))
            step += 1
            snapshots.save(step, params)
    if MODE != "export":
        show(jax.jit(predict)(params, batch(ARGUMENTS))["logits"])
    else:
        paceline.jax.export(lambda params, inputs: predict(params, inputs["image"]), params, {"image": batch(["0"])})


globals()[FRAMEWORK]()
