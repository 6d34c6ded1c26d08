"""A transformer: an encoder that reads a text, and a decoder that writes another, one token after the other."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from vocab import PAD


class Composite(layers.Layer):
    """A layer of other layers, all of which have their variables before it is first called: to call it only for that
    would take time at every start, and Keras would trace `call` once more."""

    def build(self, *_: Any) -> None: ...


class Dense(Composite):
    """Fewer operations than Keras', whose inputs may have any number of dimensions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = self.add_weight([inputs, outputs], name="kernel")
        self.bias = self.add_weight([outputs], "zeros", name="bias")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.bias_add(tf.einsum("bti,io->bto", x, self.kernel), self.bias)


class Embedding(Composite):
    """Tokens and their positions in the text, encoded as waves of fixed lengths: no text is too long."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.tokens.build()
        self.dropout = layers.Dropout(dropout)
        self.width = width
        self.waves = tf.constant(1 / 10_000 ** (np.arange(0, width, 2) / width), tf.float32)

    def call(self, numbers: tf.Tensor, training: bool = False) -> tf.Tensor:
        angles = tf.cast(tf.range(tf.shape(numbers)[1]), tf.float32)[:, None] * self.waves
        positions = tf.concat([tf.sin(angles), tf.cos(angles)], axis=1)
        return self.dropout(self.tokens(numbers) * self.width**0.5 + positions, training=training)


class Attention(Composite):
    """Each position of a text reads from all positions of a memory that it may see, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.asked, self.offered = Dense(width, width), Dense(width, 2 * width)
        self.joined = Dense(width, width)
        self.heads, self.size = heads, width // heads

    def call(self, x: tf.Tensor, memory: tf.Tensor, visible: tf.Tensor) -> tf.Tensor:
        """`visible`: whether a position of the memory may be read, for each position of the text."""
        keys, values = tf.split(self.offered(memory), 2, axis=-1)
        scores = tf.einsum("bthd,bmhd->bhtm", self.by_head(self.asked(x)), self.by_head(keys)) * self.size**-0.5
        weights = tf.nn.softmax(tf.where(visible[:, None], scores, -1e9))
        read = tf.einsum("bhtm,bmhd->bthd", weights, self.by_head(values))
        return self.joined(tf.reshape(read, tf.shape(x)))

    def by_head(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], self.heads, self.size])


class Join(Composite):
    """Adds the output of a sublayer to its input, and normalizes."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = layers.Dropout(dropout)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.norm.build([None, width])

    def call(self, x: tf.Tensor, output: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.norm(x + self.dropout(output, training=training))


class Reader(Composite):
    """A block of the encoder: attention to all of the text, then two dense layers."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.after_attention = Attention(width, heads), Join(width, dropout)
        self.inner, self.outer = Dense(width, inner), Dense(inner, width)
        self.after_dense = Join(width, dropout)

    def call(self, x: tf.Tensor, real: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.after_attention(x, self.attention(x, x, real), training=training)
        return self.after_dense(x, self.outer(tf.nn.relu(self.inner(x))), training=training)


class Writer(Composite):
    """A block of the decoder: attention to the output so far, to the encoded text, then two dense layers."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.after_attention = Attention(width, heads), Join(width, dropout)
        self.reading, self.after_reading = Attention(width, heads), Join(width, dropout)
        self.inner, self.outer = Dense(width, inner), Dense(inner, width)
        self.after_dense = Join(width, dropout)

    def call(
        self, x: tf.Tensor, earlier: tf.Tensor, memory: tf.Tensor, real: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        x = self.after_attention(x, self.attention(x, x, earlier), training=training)
        x = self.after_reading(x, self.reading(x, memory, real), training=training)
        return self.after_dense(x, self.outer(tf.nn.relu(self.inner(x))), training=training)


class Transformer(keras.Model):
    """`config()` is enough to rebuild it: store it in the snapshot. It has all its variables from the beginning."""

    def __init__(
        self,
        source: int,
        target: int,
        depth: int = 4,
        width: int = 128,
        inner: int = 512,
        heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        """`source` and `target` are the sizes of the vocabularies."""
        super().__init__()
        if width % heads or width % 2:
            raise ValueError(f"a width of {width} is odd, or not divisible by {heads} heads")
        self.sizes = {
            "source": source, "target": target, "depth": depth, "width": width, "inner": inner, "heads": heads,
            "dropout": dropout,
        }  # fmt: skip
        self.reads, self.writes = Embedding(source, width, dropout), Embedding(target, width, dropout)
        for number in range(depth):  # by name, because TensorFlow's checkpoints do not track these lists
            setattr(self, f"reader_{number}", Reader(width, inner, heads, dropout))
            setattr(self, f"writer_{number}", Writer(width, inner, heads, dropout))
        self.scores = Dense(width, target)
        self.build()

    def build(self, *_: Any) -> None: ...

    def config(self) -> dict[str, Any]:
        return dict(self.sizes)

    def call(self, source: tf.Tensor, target: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Scores of each possible next token, at each position of the target; ignore those of padding."""
        return self.decode(source, self.encode(source, training), target, training)

    def encode(self, source: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.reads(source, training=training)
        for number in range(self.sizes["depth"]):
            x = getattr(self, f"reader_{number}")(x, _real(source), training=training)
        return x

    def decode(self, source: tf.Tensor, memory: tf.Tensor, target: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.writes(target, training=training)
        # Padding comes last in a text, so a position that sees only earlier ones, and itself, never sees it.
        position = tf.range(tf.shape(target)[1])
        earlier = (position[:, None] >= position)[None]
        for number in range(self.sizes["depth"]):
            x = getattr(self, f"writer_{number}")(x, earlier, memory, _real(source), training=training)
        return self.scores(x)


def _real(source: tf.Tensor) -> tf.Tensor:
    """The attention mask: all positions of the source except padding."""
    return tf.not_equal(source, PAD)[:, None, :]


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up over `steps` batches of `batch` examples, then decay with the square root of the steps.

    With a larger global batch, warm-up takes the same number of examples in fewer steps, and all rates grow with the
    square root of the batch.
    """

    def __init__(self, width: int, steps: int, batch: int, global_batch: int, factor: float = 1.0) -> None:
        self.width, self.steps, self.batch, self.global_batch, self.factor = width, steps, batch, global_batch, factor

    def __call__(self, step: Any) -> tf.Tensor:
        number = tf.cast(step, tf.float32) + 1
        warm_up = self.steps * self.batch / self.global_batch
        return self.factor * self.width**-0.5 * tf.minimum(number**-0.5, number * warm_up**-1.5)

    def get_config(self) -> dict[str, Any]:
        return vars(self)


class Adam(keras.optimizers.Optimizer):
    """Adam, with the moments of all variables in two vectors. For each variable of the model, Keras' own has two more,
    and twenty operations: creating and tracing them would take half of the time of a start."""

    def __init__(self, rate: Any, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> None:
        super().__init__(rate)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self.sizes = [math.prod(variable.shape) for variable in variables]
        self.first, self.second = (self.add_variable([sum(self.sizes)], name=name) for name in ("first", "second"))

    def apply(self, grads: list[tf.Tensor], trainable_variables: list[Any]) -> None:
        """Each replica has its own copy of all variables, and changes it in the same way."""
        step = tf.cast(self.iterations + 1, tf.float32)
        rate = self.learning_rate * tf.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in grads], axis=0)
        gradient = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, flat)
        first = _moved(self.first, gradient, self.beta_1)
        second = _moved(self.second, gradient * gradient, self.beta_2)
        changes = tf.split(rate * first / (tf.sqrt(second) + self.epsilon), self.sizes)
        for variable, change in zip(trainable_variables, changes, strict=True):
            tf.raw_ops.AssignSubVariableOp(resource=variable.value.handle, value=tf.reshape(change, variable.shape))
        self.iterations.assign_add(1)


def _moved(mean: Any, value: tf.Tensor, share: float) -> tf.Tensor:
    """The new value of a moving mean."""
    new = share * tf.convert_to_tensor(mean.value) + (1 - share) * value
    tf.raw_ops.AssignVariableOp(resource=mean.value.handle, value=new)
    return new
