"""Writes small SavedModels: FOLDER/1 and FOLDER/2 return their input once and twice, FOLDER/reads reads files.

The duration of their signature `count` depends on its input: it counts to the largest number.
"""

import sys

import tensorflow as tf


class Toy(tf.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = tf.Variable(factor)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def answer(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.assert_non_negative(x, "x must not be negative")]):
            return {"y": x * self.factor, "sum": tf.reduce_sum(x, axis=1)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text"), tf.TensorSpec([], tf.int32, name="n")])
    def repeat(self, text: tf.Tensor, n: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"text": tf.strings.reduce_join(tf.repeat(text[:, None], n, axis=1), axis=1), "raw_bytes": text}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name="to")])
    def count(self, to: tf.Tensor) -> dict[str, tf.Tensor]:
        largest = tf.reduce_max(to)
        (counted,) = tf.while_loop(lambda n: n < largest, lambda n: (n + 1,), (0,), parallel_iterations=1)
        return {"counted": tf.fill(tf.shape(to), counted)}


class Reads(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([], tf.string, name="path")])
    def read(self, path: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"data": tf.io.read_file(path)}


for factor in (1, 2):
    toy = Toy(float(factor))
    signatures = {"serving_default": toy.answer, "repeat": toy.repeat, "count": toy.count}
    tf.saved_model.save(toy, f"{sys.argv[1]}/{factor}", signatures=signatures)
reads = Reads()
tf.saved_model.save(reads, f"{sys.argv[1]}/reads", signatures={"serving_default": reads.read})
