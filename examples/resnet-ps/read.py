"""Classifies test images with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse
import os

import cifar
import tensorflow as tf
from network import resnet

import paceline
from paceline.tensorflow import export, settings

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("numbers", type=int, nargs="*", help="indices of the test images, from 0")
parser.add_argument("--data", help="CIFAR-10's binary files: a folder, or s3://, gs://, az://")
parser.add_argument("--export", action="store_true")
args = parser.parse_args()

model = resnet(settings()["depth"])
status = tf.train.Checkpoint(model=model).read(f"{os.environ['PACELINE_RESTORE']}/ckpt")
status.assert_existing_objects_matched()
status.expect_partial()  # the momentum is not needed


@tf.function(input_signature=[tf.TensorSpec([None, 32, 32, 3], tf.uint8, name="images")])
def classify(images: tf.Tensor) -> dict[str, tf.Tensor]:
    """Takes images as stored in the files: clients need no preprocessing."""
    return {"logits": model(tf.image.per_image_standardization(images), training=False)}


if args.export:
    export(model, signatures={"serving_default": classify})
if args.numbers:
    images, labels = cifar.testing(paceline.fetch(args.data))
    probabilities = tf.nn.softmax(classify(images[args.numbers])["logits"]).numpy()
    for number, row in zip(args.numbers, probabilities, strict=True):
        print(f"image {number}: predicted class {row.argmax()} ({row.max():.1%}), actual {labels[number]}")
