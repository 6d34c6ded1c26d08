"""Exports a snapshot as a SavedModel that converts the tokens of a text to those of its translation.

It decodes greedily inside of the graph: serving it needs neither this code nor a loop. The vocabularies are stored next
to it, in `vocabularies.json`.
"""

import argparse
import json

import tensorflow as tf
from restored import restored
from vocab import END, PAD, START

from paceline.tensorflow import export

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--longest", type=int, default=128, help="maximum number of tokens of a translation")
args = parser.parse_args()
model, source, target = restored()


@tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, name="source")])
def translate(source: tf.Tensor) -> dict[str, tf.Tensor]:
    """From texts that end with [end], padded with [pad], to translations in the same form."""
    memory = model.encode(source)
    texts = tf.fill([tf.shape(source)[0], 1], START)
    running = tf.ones([tf.shape(source)[0]], tf.bool)

    def is_unfinished(texts: tf.Tensor, running: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(running) & (tf.shape(texts)[1] <= args.longest)

    def write(texts: tf.Tensor, running: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        scores = model.decode(source, memory, texts)[:, -1]
        token = tf.where(running, tf.argmax(scores, axis=-1, output_type=tf.int32), PAD)
        return tf.concat([texts, token[:, None]], axis=1), running & (token != END)

    shapes = [tf.TensorShape([None, None]), tf.TensorShape([None])]
    texts, _ = tf.while_loop(is_unfinished, write, [texts, running], shape_invariants=shapes)
    return {"target": texts[:, 1:]}


folder = export(model, signatures={"translate": translate})
vocabularies = {"source": source.tokens, "target": target.tokens}
(folder / "vocabularies.json").write_text(json.dumps(vocabularies, ensure_ascii=False), encoding="utf-8")
