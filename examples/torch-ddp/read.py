"""Reads held-out digits with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse
import os
from pathlib import Path

import torch
from train import digits, network

from paceline.torch import export

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("numbers", type=int, nargs="*", help="indices of the 1,000 held-out digits, from 0")
parser.add_argument("--export", action="store_true")
args = parser.parse_args()

model = network()
saved = torch.load(Path(os.environ["PACELINE_RESTORE"], "state.pt"), weights_only=True)  # includes the optimizer
model.load_state_dict(saved["model"])
model.eval()
images, labels = digits()[1].tensors
if args.export:
    export(model, images[:1], outputs=["logits"])
if args.numbers:
    with torch.no_grad():
        probabilities = model(images[args.numbers]).softmax(dim=1)
    for number, row in zip(args.numbers, probabilities, strict=True):
        print(f"digit {number}: predicted {int(row.argmax())} ({row.max():.1%}), actual {labels[number]}")
