"""Names test images with a snapshot: `paceline try RUN -- 3 14 15`; or exports it: `paceline export RUN`."""

import argparse
import os

import cifar
import tensorflow as tf
from network import resnet

import paceline
from paceline.tensorflow import export, settings

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("numbers", type=int, nargs="*", help="which of the test images, from 0 on")
options.add_argument("--data", help="CIFAR-10's binary files: a folder, or s3://, gs://, az://")
options.add_argument("--export", action="store_true")
given = options.parse_args()

model = resnet(settings()["depth"])
status = tf.train.Checkpoint(model=model).read(f"{os.environ['PACELINE_RESTORE']}/ckpt")
status.assert_existing_objects_matched()
status.expect_partial()  # the momentum is not wanted


@tf.function(input_signature=[tf.TensorSpec([None, 32, 32, 3], tf.uint8, name="images")])
def classify(images: tf.Tensor) -> dict[str, tf.Tensor]:
    """Images as they are in the files: whoever asks has nothing to prepare."""
    return {"logits": model(tf.image.per_image_standardization(images), training=False)}


if given.export:
    export(model, signatures={"serving_default": classify})
if given.numbers:
    images, labels = cifar.testing(paceline.fetch(given.data))
    sure = tf.nn.softmax(classify(images[given.numbers])["logits"]).numpy()
    for number, share in zip(given.numbers, sure, strict=True):
        print(f"image {number} is of class {share.argmax()} ({share.max():.1%}), and its label is {labels[number]}")
