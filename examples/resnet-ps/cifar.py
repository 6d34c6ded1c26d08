"""The binary files of CIFAR-10: records of a label (one byte) and an image (3 x 32 x 32 bytes)."""

from pathlib import Path

import numpy as np

RECORD = 1 + 3 * 32 * 32

Examples = tuple[np.ndarray, np.ndarray]  # images as bytes, n x 32 x 32 x 3; labels


def training(folder: Path) -> Examples:
    return _read(sorted(folder.glob("data_batch_*.bin")), folder / "data_batch_1.bin")


def testing(folder: Path) -> Examples:
    return _read(sorted(folder.glob("test_batch.bin")), folder / "test_batch.bin")


def write(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    flat = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    path.write_bytes(np.concatenate([labels[:, None], flat], axis=1).astype(np.uint8).tobytes())


def _read(paths: list[Path], first: Path) -> Examples:
    if not paths:
        raise SystemExit(f"{first} does not exist; set --data to the folder of CIFAR-10's binary files")
    for path in paths:
        if path.stat().st_size % RECORD:
            raise SystemExit(
                f"{path} has {path.stat().st_size} bytes, which is not a whole number of {RECORD}-byte records"
            )
    records = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, RECORD) for path in paths])
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(np.int64)
