"""Reads held-out digits with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse

import jax
import numpy as np
from train import BATCH, adam, begin, digits, network

import paceline
from paceline.jax import Snapshots, export

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("numbers", type=int, nargs="*", help="which of the 1,000 held-out digits, from 0 on")
options.add_argument("--export", action="store_true")
given = options.parse_args()

train, (images, labels) = digits()
# What is restored has the form of what was saved; of all that, the weights are wanted.
state, _ = Snapshots(order=paceline.Shards(size=len(train[0]), batch=BATCH)).restore(begin(adam(steps=1)))
weights = state["weights"]
if given.export:
    export(lambda weights, images: {"logits": network(weights, images)}, weights, images[:1])
if given.numbers:
    sure = np.asarray(jax.nn.softmax(network(weights, images[given.numbers])))
    for number, share in zip(given.numbers, sure, strict=True):
        print(f"digit {number} reads {share.argmax()} ({share.max():.1%}), and is {labels[number]}")
