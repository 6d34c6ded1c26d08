"""Reads held-out images with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse
import os

import tensorflow as tf
from digits import HELD_OUT, images, labels, network

from paceline.tensorflow import export

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("numbers", type=int, nargs="*", help=f"which of the {HELD_OUT} held-out images, from 0 on")
options.add_argument("--export", action="store_true")
given = options.parse_args()

model = network()
status = tf.train.Checkpoint(model=model).read(f"{os.environ['PACELINE_RESTORE']}/ckpt")
status.assert_existing_objects_matched()
status.expect_partial()  # the optimizer is not wanted
if given.export:
    export(model)
if given.numbers:
    sure = tf.nn.softmax(model(images[given.numbers], training=False)).numpy()
    for number, share in zip(given.numbers, sure, strict=True):
        print(f"digit {number} reads {share.argmax()} ({share.max():.1%}), and is {labels[number]}")
