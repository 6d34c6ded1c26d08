"""Reads held-out digits with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse

import jax
import numpy as np
from train import BATCH, adam, begin, digits, network

import paceline
from paceline.jax import Snapshots, export

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("numbers", type=int, nargs="*", help="indices of the 1,000 held-out digits, from 0")
parser.add_argument("--export", action="store_true")
args = parser.parse_args()

train, (images, labels) = digits()
# The restored state has the structure of the saved one; only the weights are used.
state, _ = Snapshots(order=paceline.Shards(size=len(train[0]), batch=BATCH)).restore(begin(adam(steps=1)))
weights = state["weights"]
if args.export:
    export(lambda weights, images: {"logits": network(weights, images)}, weights, images[:1])
if args.numbers:
    probabilities = np.asarray(jax.nn.softmax(network(weights, images[args.numbers])))
    for number, row in zip(args.numbers, probabilities, strict=True):
        print(f"digit {number}: predicted {row.argmax()} ({row.max():.1%}), actual {labels[number]}")
