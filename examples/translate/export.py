"""Exports a snapshot as a SavedModel that takes a text's tokens and gives those of its translation.

It decodes inside of the graph, greedily: whoever serves it needs neither this code nor a loop. The vocabularies lie
beside it, in `vocabularies.json`.
"""

import argparse
import json

import tensorflow as tf
from restored import restored
from vocab import END, PAD, START

from paceline.tensorflow import export

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--longest", type=int, default=128, help="tokens of a translation, at most")
given = options.parse_args()
model, source, target = restored()


@tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, name="source")])
def translate(source: tf.Tensor) -> dict[str, tf.Tensor]:
    """Texts with [end] at their end, padded with [pad]; and translations in the same form."""
    memory = model.encode(source)
    texts = tf.fill([tf.shape(source)[0], 1], START)
    running = tf.ones([tf.shape(source)[0]], tf.bool)

    def more(texts: tf.Tensor, running: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(running) & (tf.shape(texts)[1] <= given.longest)

    def write(texts: tf.Tensor, running: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        scores = model.decode(source, memory, texts)[:, -1]
        token = tf.where(running, tf.argmax(scores, axis=-1, output_type=tf.int32), PAD)
        return tf.concat([texts, token[:, None]], axis=1), running & (token != END)

    free = [tf.TensorShape([None, None]), tf.TensorShape([None])]
    texts, _ = tf.while_loop(more, write, [texts, running], shape_invariants=free)
    return {"target": texts[:, 1:]}


folder = export(model, signatures={"translate": translate})
words = {"source": source.tokens, "target": target.tokens}
(folder / "vocabularies.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
