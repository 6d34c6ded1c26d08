"""The files of a snapshot: plain `torch.save`, so that `torch.load(path, weights_only=True, mmap=True)` reads each.

- state.pt: the state dicts by name, and under "paceline" step, order, random state and what else is needed to go on.
- shard-<rank>-of-<world>.pt: where tensors are sharded, each rank's part of them: name -> [(offset, tensor), ...]. In
  state.pt stands {"paceline.sharded": name, "shape": [...]} in their place.

Not the files of torch.distributed.checkpoint: its index is a pickle, and so is all in it that is no tensor.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.runtime.boxes import overlap
from paceline.runtime.misfits import SnapshotRefused
from paceline.torch.tree import mapped, trusted

STATE = "state.pt"
_SHARDED = "paceline.sharded"

Piece = tuple[tuple[int, ...], torch.Tensor]  # where it begins in the whole, and what is there


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05}-of-{world:05}.pt"


def is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # where it is not loaded, nothing is one
    return module is not None and isinstance(value, module.DTensor)


def split(tree: Any) -> tuple[Any, dict[str, list[Piece]] | None]:
    """What one task writes for all, and this rank's parts of sharded tensors; None where none is sharded."""
    parts: dict[str, list[Piece]] = {}
    sharded = False

    def change(tensor: torch.Tensor, path: str) -> Any:
        nonlocal sharded
        if not is_dtensor(tensor):
            return tensor.detach()
        sharded = True
        pieces = [(offset, local) for offset, local in local_pieces(tensor) if local.numel() or not tensor.numel()]
        if pieces and _first_copy(tensor):
            parts[path] = pieces
        return {_SHARDED: path, "shape": list(tensor.shape)}

    changed = mapped(tree, change)
    return changed, parts if sharded else None


def local_pieces(tensor: Any) -> list[Piece]:
    """This rank's part of a DTensor, by the protocol of torch.distributed.checkpoint."""
    chunks = tensor.__create_chunk_list__()
    return [(tuple(chunk.offsets), tensor.detach().to_local()) for chunk in chunks]


def _first_copy(tensor: Any) -> bool:
    """Where ranks hold the same part, the first of them writes it."""
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        at == 0 for at, placement in zip(place, tensor.placements) if placement.is_replicate()
    )


class Saved:
    """A snapshot as it lies on disk: nothing of it is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / STATE).is_file():
            raise SnapshotRefused(f"{folder} holds no {STATE}: it was not written by paceline.torch")
        self.tree: dict[str, Any] = _load(folder / STATE)
        if not isinstance(self.tree, dict):
            raise SnapshotRefused(f"{folder / STATE} holds a {type(self.tree).__name__}, no state dicts by name")
        self._pieces: dict[str, list[Piece]] = {}
        for path in sorted(folder.glob("shard-*-of-*.pt")):
            for name, pieces in _load(path).items():
                self._pieces.setdefault(name, []).extend(pieces)

    def whole(self, value: Any) -> Any:
        """A copy of a value with all its tensors, sharded ones put together."""
        if is_marker(value):
            return self.region(value, (0,) * len(value["shape"]), value["shape"])
        if isinstance(value, Mapping):
            into: Any = type(value)()
            for key, inner in value.items():
                into[key] = self.whole(inner)
            return into
        if type(value) in (list, tuple, set):
            return type(value)(self.whole(inner) for inner in value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def dtype(self, value: Any) -> torch.dtype:
        return self._known(value)[0][1].dtype

    def words(self, value: Any) -> str:
        """Of a tensor, whole or sharded."""
        shape = shape_of(value)
        if shape is None:
            return "no tensor"
        dtype = self.dtype(value) if is_marker(value) else value.dtype
        return f"{str(dtype).removeprefix('torch.')}{shape}"

    def _known(self, value: Any) -> list[Piece]:
        pieces = self._pieces.get(value[_SHARDED], []) if is_marker(value) else [((0,) * value.dim(), value)]
        if not pieces:
            raise SnapshotRefused(f"{self.folder}: no part of {value[_SHARDED]} is there")
        return pieces

    def region(self, value: Any, offset: Any, size: Any) -> torch.Tensor:
        """A box of a tensor, from whichever files hold it."""
        pieces = self._known(value)
        into, filled = torch.empty(tuple(size), dtype=pieces[0][1].dtype), 0
        for begin, piece in pieces:
            common = overlap(offset, size, begin, piece.shape)
            if common is not None:
                ours, theirs = common
                into[ours] = piece[theirs]
                filled += piece[theirs].numel()
        if filled != into.numel():
            raise SnapshotRefused(
                f"{self.folder}: of {value[_SHARDED]} {into.numel()} numbers are needed and {filled} are there"
            )
        return into


def is_marker(value: Any) -> bool:
    return isinstance(value, dict) and _SHARDED in value


def shape_of(value: Any) -> list[int] | None:
    """Of a tensor, whole or sharded; None for anything else."""
    if is_marker(value):
        return list(value["shape"])
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _load(path: Path) -> Any:
    mapping = zipfile.is_zipfile(path)  # files of old versions of torch are not, and cannot be mapped
    try:
        return torch.load(path, map_location="cpu", mmap=mapping, weights_only=not trusted())
    except pickle.UnpicklingError as error:
        raise SnapshotRefused(
            f"{path} can only be read by running code that it holds (pickle), and was refused. Where you trust who"
            f" wrote it, say snapshots.trust: true in the job file. {str(error).splitlines()[0]}"
        ) from error
