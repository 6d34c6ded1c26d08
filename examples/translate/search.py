"""Writes the most likely text, token by token: greedy, or with a beam of several candidate texts."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from model import Transformer
from vocab import END, PAD, START


class Search:
    def __init__(self, model: Transformer) -> None:
        ids = tf.TensorSpec([None, None], tf.int32)
        values = tf.TensorSpec([None, None, None], tf.float32)
        self._encode = tf.function(model.encode, input_signature=[ids])
        self._next = tf.function(
            lambda source, memory, target: tf.nn.log_softmax(model.decode(source, memory, target)[:, -1]),
            input_signature=[ids, values, ids],
        )

    def __call__(self, source: list[int], beam: int = 1, longest: int = 128) -> list[int]:
        """The tokens of the translation, without start and end. A beam of 1 takes the likeliest token each time."""
        text = tf.constant([source], tf.int32)
        memory = self._encode(text)
        texts, chances = np.full([1, 1], START, np.int32), np.zeros(1)
        ended: list[tuple[float, list[int]]] = []
        for length in range(1, longest + 1):
            many = len(texts)
            scores = self._next(tf.repeat(text, many, axis=0), tf.repeat(memory, many, axis=0), texts).numpy()
            scores[:, [PAD, START]] = -np.inf
            total = (chances[:, None] + scores).ravel()
            first = np.argsort(-total, kind="stable")[:beam]
            rows, tokens = np.divmod(first, scores.shape[1])
            texts, chances = np.column_stack([texts[rows], tokens]).astype(np.int32), total[first]
            # By the mean over the tokens: otherwise, the shortest texts would win.
            ended += [(chances[row] / length, texts[row, 1:-1].tolist()) for row in np.flatnonzero(tokens == END)]
            texts, chances = texts[tokens != END], chances[tokens != END]
            if len(ended) >= beam or not len(texts):
                break
        return max(ended)[1] if ended else texts[np.argmax(chances), 1:].tolist()
