"""The files of a snapshot: plain `torch.save`, so that `torch.load(path, weights_only=True, mmap=True)` reads each.

- state.pt: the state dicts by name, and under "paceline" step, order, random state and what else is needed to resume.
- shard-<rank>-of-<world>.pt: if tensors are sharded, each rank's part of them: name -> [(offset, tensor), ...]. In
  state.pt, {"paceline.sharded": name, "shape": [...]} replaces them.

torch.distributed.checkpoint is not used: its index, and everything in it that is not a tensor, is pickled.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.runtime.array_overlaps import overlap
from paceline.runtime.snapshot_mismatches import SnapshotRefused
from paceline.torch.state_trees import mapped, trusted

STATE = "state.pt"
_SHARDED = "paceline.sharded"

Piece = tuple[tuple[int, ...], torch.Tensor]  # its offset in the whole tensor, and its values


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05}-of-{world:05}.pt"


def is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # if it is not loaded, there are no DTensors
    return module is not None and isinstance(value, module.DTensor)


def split(tree: Any) -> tuple[Any, dict[str, list[Piece]] | None]:
    """What one task writes for all, and this rank's parts of sharded tensors; None if no tensor is sharded."""
    parts: dict[str, list[Piece]] = {}
    sharded = False

    def replace(tensor: torch.Tensor, path: str) -> Any:
        nonlocal sharded
        if not is_dtensor(tensor):
            return tensor.detach()
        sharded = True
        pieces = [(offset, local) for offset, local in local_pieces(tensor) if local.numel() or not tensor.numel()]
        if pieces and _first_copy(tensor):
            parts[path] = pieces
        return {_SHARDED: path, "shape": list(tensor.shape)}

    whole = mapped(tree, replace)
    return whole, parts if sharded else None


def local_pieces(tensor: Any) -> list[Piece]:
    """This rank's part of a DTensor, through the protocol of torch.distributed.checkpoint."""
    chunks = tensor.__create_chunk_list__()
    return [(tuple(chunk.offsets), tensor.detach().to_local()) for chunk in chunks]


def _first_copy(tensor: Any) -> bool:
    """If several ranks have the same part, the first of them writes it."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        index == 0 for index, placement in zip(coordinate, tensor.placements) if placement.is_replicate()
    )


class Saved:
    """A snapshot on disk; tensors are read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / STATE).is_file():
            raise SnapshotRefused(f"{folder}: {STATE} is missing: the snapshot was not written by paceline.torch")
        self.tree: dict[str, Any] = _load(folder / STATE)
        if not isinstance(self.tree, dict):
            raise SnapshotRefused(f"{folder / STATE}: contains a {type(self.tree).__name__}, not state dicts by name")
        self._pieces: dict[str, list[Piece]] = {}
        for path in sorted(folder.glob("shard-*-of-*.pt")):
            for name, pieces in _load(path).items():
                self._pieces.setdefault(name, []).extend(pieces)

    def whole(self, value: Any) -> Any:
        """A copy of a value with all its tensors, sharded ones assembled."""
        if is_marker(value):
            return self.region(value, (0,) * len(value["shape"]), value["shape"]).clone()
        if isinstance(value, Mapping):
            copied: Any = type(value)()
            for key, inner in value.items():
                copied[key] = self.whole(inner)
            return copied
        if type(value) in (list, tuple, set):
            return type(value)(self.whole(inner) for inner in value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def dtype(self, value: Any) -> torch.dtype:
        return self._pieces_of(value)[0][1].dtype

    def describe(self, value: Any) -> str:
        """Type and shape of a tensor, whole or sharded, for messages."""
        shape = shape_of(value)
        if shape is None:
            return "not a tensor"
        dtype = self.dtype(value) if is_marker(value) else value.dtype
        return f"{str(dtype).removeprefix('torch.')}{shape}"

    def _pieces_of(self, value: Any) -> list[Piece]:
        pieces = self._pieces.get(value[_SHARDED], []) if is_marker(value) else [((0,) * value.dim(), value)]
        if not pieces:
            raise SnapshotRefused(f"{self.folder}: all parts of {value[_SHARDED]} are missing")
        return pieces

    def region(self, value: Any, offset: Any, size: Any) -> torch.Tensor:
        """A rectangular region of a tensor: a piece as it is in a file, or assembled from several. Do not change it."""
        pieces = self._pieces_of(value)
        for piece_offset, piece in pieces:
            if tuple(piece_offset) == tuple(offset) and tuple(piece.shape) == tuple(size):
                return piece
        target, filled = torch.empty(tuple(size), dtype=pieces[0][1].dtype), 0
        for piece_offset, piece in pieces:
            common = overlap(offset, size, piece_offset, piece.shape)
            if common is not None:
                ours, theirs = common
                target[ours] = piece[theirs]
                filled += piece[theirs].numel()
        if filled != target.numel():
            raise SnapshotRefused(
                f"{self.folder}: {value[_SHARDED]} is incomplete: {filled} of {target.numel()} numbers exist"
            )
        return target


def is_marker(value: Any) -> bool:
    return isinstance(value, dict) and _SHARDED in value


def shape_of(value: Any) -> list[int] | None:
    """The shape of a tensor, whole or sharded; None for anything else."""
    if is_marker(value):
        return list(value["shape"])
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _load(path: Path) -> Any:
    mapping = zipfile.is_zipfile(path)  # files of old versions of torch are no zip files, and cannot be mapped
    try:
        return torch.load(path, map_location="cpu", mmap=mapping, weights_only=not trusted())
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0].rstrip(" .")
        raise SnapshotRefused(
            f"{path}: reading it would run code that it contains (pickle): {reason}; if you trust its author, set"
            " snapshots.trust: true in the job file"
        ) from error
