"""Reads held-out images with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse
import os

import tensorflow as tf
from digits import HELD_OUT, images, labels, network

from paceline.tensorflow import export

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("numbers", type=int, nargs="*", help=f"indices of the {HELD_OUT} held-out images, from 0")
parser.add_argument("--export", action="store_true")
args = parser.parse_args()

model = network()
status = tf.train.Checkpoint(model=model).read(f"{os.environ['PACELINE_RESTORE']}/ckpt")
status.assert_existing_objects_matched()
status.expect_partial()  # the optimizer is not needed
if args.export:
    export(model)
if args.numbers:
    probabilities = tf.nn.softmax(model(images[args.numbers], training=False)).numpy()
    for number, row in zip(args.numbers, probabilities, strict=True):
        print(f"digit {number}: predicted {row.argmax()} ({row.max():.1%}), actual {labels[number]}")
