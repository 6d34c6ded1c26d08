"""The model and the vocabularies of a snapshot: all sizes are read from it."""

from __future__ import annotations

import os
import sys

import tensorflow as tf
from model import Transformer
from vocab import Vocabulary

from paceline.tensorflow import settings


def restored() -> tuple[Transformer, Vocabulary, Vocabulary]:
    saved = settings()
    if saved is None:
        sys.exit("there is no snapshot; use `paceline try RUN`, or set PACELINE_RESTORE to the folder of one")
    model = Transformer(**saved["model"])
    status = tf.train.Checkpoint(model=model).read(f"{os.environ['PACELINE_RESTORE']}/ckpt")
    status.assert_existing_objects_matched()
    status.expect_partial()  # the optimizer is not needed
    return model, Vocabulary(saved["source"]), Vocabulary(saved["target"])
