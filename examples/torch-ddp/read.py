"""Reads held-out digits with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse
import os
from pathlib import Path

import torch
from train import digits, network

from paceline.torch import export

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("numbers", type=int, nargs="*", help="which of the 1,000 held-out digits, from 0 on")
options.add_argument("--export", action="store_true")
given = options.parse_args()

model = network()
saved = torch.load(Path(os.environ["PACELINE_RESTORE"], "state.pt"), weights_only=True)  # the optimizer is not wanted
model.load_state_dict(saved["model"])
model.eval()
images, labels = digits()[1].tensors
if given.export:
    export(model, images[:1], outputs=["logits"])
if given.numbers:
    with torch.no_grad():
        sure = model(images[given.numbers]).softmax(dim=1)
    for number, share in zip(given.numbers, sure, strict=True):
        print(f"digit {number} reads {int(share.argmax())} ({share.max():.1%}), and is {labels[number]}")
