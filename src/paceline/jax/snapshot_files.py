"""The files of a snapshot: .npy files, and a JSON index. Each process writes its own.

index-<process>-of-<processes>.json: step, order, random state, and the leaves: path, shape, dtype, and the pieces that
this process wrote: {"offset": [...], "shape": [...], "file": "..."}. numpy does not support some types (bfloat16,
float8): those files contain raw bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paceline.jax.leaves import Leaf
from paceline.runtime.array_overlaps import overlap
from paceline.runtime.snapshot_mismatches import SnapshotRefused

_FIELDS = ("path", "kind", "shape", "dtype", "value", "stored")
_SMALL = 1 << 16  # bytes; below that, reading is faster than mapping


def write(folder: Path, leaves: list[Leaf], about: dict[str, Any], process: int, processes: int) -> None:
    entries = []
    for number, leaf in enumerate(leaves):
        pieces = []
        for count, (offset, array) in enumerate(leaf.pieces):
            name = f"{number:05}-{process:05}-{count}.npy"
            pieces.append({"offset": offset, "shape": list(array.shape), "file": name})
            supported = array.dtype.isbuiltin == 1
            np.save(folder / name, array if supported else array.reshape(-1).view(np.uint8), allow_pickle=False)
        entries.append({**{name: getattr(leaf, name) for name in _FIELDS}, "pieces": pieces})
    index = {**about, "leaves": entries}
    (folder / f"index-{process:05}-of-{processes:05}.json").write_text(json.dumps(index))


class Saved:
    """A snapshot on disk, with the pieces of all processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob("index-*-of-*.json"))
        if not paths:
            raise SnapshotRefused(f"{folder}: index-*.json is missing: the snapshot was not written by paceline.jax")
        self.indices = [json.loads(path.read_text()) for path in paths]
        processes = int(paths[0].stem.rpartition("-")[2])
        if len(paths) != processes:
            raise SnapshotRefused(f"{folder}: {processes} processes wrote it, but the parts of only {len(paths)} exist")
        self.about = self.indices[0]
        self.leaves = {one["path"]: Leaf(*(one[name] for name in _FIELDS)) for one in self.about["leaves"]}
        self._pieces: dict[str, list[Any]] = {path: [] for path in self.leaves}
        for index in self.indices:
            for one in index["leaves"]:
                self._pieces[one["path"]] += one["pieces"]

    def shape(self, path: str) -> tuple[int, ...]:
        """The stored shape: that of a random key has more dimensions."""
        return tuple(self.leaves[path].stored[0])

    def region(self, path: str, index: Any) -> Any:
        """A rectangular region of an array, assembled from the files that contain it. `index`: slices, as JAX passes
        them."""
        whole = self.shape(path)
        bounds = [part.indices(size) for part, size in zip(index, whole)]
        offset, size = [low for low, _, _ in bounds], [max(0, high - low) for low, high, _ in bounds]
        target, filled = np.empty(size, jax.numpy.dtype(self.leaves[path].stored[1])), 0
        for one in self._pieces[path]:
            common = overlap(offset, size, one["offset"], one["shape"])
            if common is not None:
                ours, theirs = common
                target[ours] = self._read(one, target.dtype)[theirs]
                filled += target[ours].size
        if filled != target.size:
            raise SnapshotRefused(f"{self.folder}: {path} is incomplete: {filled} of {target.size} numbers exist")
        return target

    def whole(self, path: str) -> Any:
        return self.region(path, tuple(slice(0, size) for size in self.shape(path)))

    def _read(self, piece: dict[str, Any], dtype: Any) -> Any:
        path = self.folder / piece["file"]
        if path.name != piece["file"]:
            raise SnapshotRefused(f"{self.folder}: {piece['file']!r} is not a file name in this folder")
        try:
            mmap_mode = "r" if path.stat().st_size > _SMALL else None
            array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)  # type: ignore[arg-type]
        except ValueError as error:
            raise SnapshotRefused(f"{path}: cannot be read without running code: {error}") from error
        if not isinstance(array, np.ndarray):  # numpy recognizes archives, whatever their name is
            raise SnapshotRefused(f"{path}: not an array")
        return array if array.dtype == dtype else array.view(dtype).reshape(piece["shape"])
