"""The group's word on a snapshot: whether all are ready for it, and everybody's random state. One small collective."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from paceline.runtime import chance

_CUDA = 16  # bytes of a GPU's random state


def place() -> tuple[int, int]:
    """Rank and number of tasks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = int(os.environ.get("PACELINE_WORLD_SIZE", "1"))
    if world > 1 and os.environ.get("PACELINE_ROLE") != "evaluator":  # which is no part of the group
        raise RuntimeError(
            f"{world} tasks train together, and torch.distributed is not initialised: call init_process_group before"
            " snapshots are taken or restored"
        )
    return 0, 1


def meet(ready: bool) -> list[bytes] | None:
    """Every rank's random state, in all ranks; None in all of them where one is not ready. All have to call it."""
    mine = bytes([ready]) + state()
    if place()[1] == 1:
        return [mine[1:]] if ready else None
    # A group that knows CPU tensors does not wait for the GPU; NCCL alone knows its own.
    device = torch.device("cpu" if "cpu:" in dist.get_backend_config() else "cuda")
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    got = [torch.empty_like(sent) for _ in range(place()[1])]
    dist.all_gather(got, sent)
    said = [bytes(one.cpu().tolist()) for one in got]
    return [one[1:] for one in said] if all(one[0] for one in said) else None


def state() -> bytes:
    """This rank's random state; of the same length in all."""
    cuda = bytes(1 + _CUDA)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = b"\1" + bytes(torch.cuda.get_rng_state().tolist())[:_CUDA].ljust(_CUDA, b"\0")
    return chance.state() + cuda + bytes(torch.get_rng_state().tolist())


def as_tensors(states: list[bytes]) -> list[dict[str, torch.Tensor]]:
    """For the file: by rank."""
    into = []
    for state in states:
        host, rest = state[: chance.SIZE], state[chance.SIZE :]
        one = {"host": _bytes(host), "torch": _bytes(rest[1 + _CUDA :])}
        if rest[0]:
            one["cuda"] = _bytes(rest[1 : 1 + _CUDA])
        into.append(one)
    return into


def load(saved: list[dict[str, torch.Tensor]]) -> None:
    """Each rank its own. In a group of another size: new ones, made of the saved ones and of the place in the group."""
    rank, world = place()
    if len(saved) == world:
        one: dict[str, Any] = {name: value.clone() for name, value in saved[rank].items()}
        chance.load(bytes(one["host"].tolist()))
        torch.set_rng_state(one["torch"])
        if "cuda" in one and torch.cuda.is_available():
            torch.cuda.set_rng_state(one["cuda"])
        return
    known = b"".join(bytes(one["torch"].tolist()) for one in saved)
    number = chance.derived(known, rank, world)
    chance.seed(number)
    torch.manual_seed(number)


def _bytes(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)
