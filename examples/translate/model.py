"""A transformer: an encoder that reads a text, and a decoder that writes another, one token after the other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from vocab import PAD


class Composite(layers.Layer):
    """A layer of other layers. They build themselves when it is first called; without this method, Keras would trace
    `call` an additional time to build them, at every start."""

    def build(self, *_: Any) -> None: ...


class Embedding(Composite):
    """Tokens and their positions in the text, encoded as waves of fixed lengths: no text is too long."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.dropout = layers.Dropout(dropout)
        self.width = width
        self.waves = tf.constant(1 / 10_000 ** (np.arange(0, width, 2) / width), tf.float32)

    def call(self, numbers: tf.Tensor, training: bool = False) -> tf.Tensor:
        angles = tf.cast(tf.range(tf.shape(numbers)[1]), tf.float32)[:, None] * self.waves
        positions = tf.concat([tf.sin(angles), tf.cos(angles)], axis=1)
        return self.dropout(self.tokens(numbers) * self.width**0.5 + positions, training=training)


class Join(Composite):
    """Adds the output of a sublayer to its input, and normalizes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = layers.Dropout(dropout)
        self.norm = layers.LayerNormalization(epsilon=1e-6)

    def call(self, x: tf.Tensor, output: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.norm(x + self.dropout(output, training=training))


class Reader(Composite):
    """A block of the encoder: attention to all of the text, then two dense layers."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.after_attention = layers.MultiHeadAttention(heads, width // heads), Join(dropout)
        self.inner, self.outer = layers.Dense(inner, activation="relu"), layers.Dense(width)
        self.after_dense = Join(dropout)

    def call(self, x: tf.Tensor, real: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.after_attention(x, self.attention(x, x, attention_mask=real), training=training)
        return self.after_dense(x, self.outer(self.inner(x)), training=training)


class Writer(Composite):
    """A block of the decoder: attention to the output so far, to the encoded text, then two dense layers."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.after_attention = layers.MultiHeadAttention(heads, width // heads), Join(dropout)
        self.reading, self.after_reading = layers.MultiHeadAttention(heads, width // heads), Join(dropout)
        self.inner, self.outer = layers.Dense(inner, activation="relu"), layers.Dense(width)
        self.after_dense = Join(dropout)

    def call(self, x: tf.Tensor, memory: tf.Tensor, real: tf.Tensor, training: bool = False) -> tf.Tensor:
        # Padding comes last in a text, so causal attention never sees it.
        x = self.after_attention(x, self.attention(x, x, use_causal_mask=True), training=training)
        x = self.after_reading(x, self.reading(x, memory, attention_mask=real), training=training)
        return self.after_dense(x, self.outer(self.inner(x)), training=training)


class Transformer(keras.Model):
    """`config()` is enough to rebuild it: store it in the snapshot."""

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
        self.scores = layers.Dense(target)
        example = tf.ones([1, 1], tf.int32)
        self(example, example)  # creates all variables, as needed before they are restored

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
        for number in range(self.sizes["depth"]):
            x = getattr(self, f"writer_{number}")(x, memory, _real(source), training=training)
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
