"""Agreement of the group on a snapshot: whether all ranks are ready, and their random states. One small collective."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from paceline.runtime import random_state

_CUDA = 16  # bytes of a GPU's random state


def rank_and_size() -> tuple[int, int]:
    """This task's rank, and the number of tasks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = int(os.environ.get("PACELINE_WORLD_SIZE", "1"))
    if "WORLD_SIZE" in os.environ:  # fewer, if `restart.scope` is not `group`: those that can form a group
        world = min(world, int(os.environ["WORLD_SIZE"]))
    if world > 1 and os.environ.get("PACELINE_ROLE") != "evaluator":  # which is not part of the group
        raise RuntimeError(
            f"{world} tasks train together, but torch.distributed is not initialized; call init_process_group before"
            " taking or restoring snapshots"
        )
    return 0, 1


def gather_if_ready(ready: bool) -> list[bytes] | None:
    """Every rank's random state, on all ranks; None on all of them if one is not ready. All ranks must call it."""
    own_message = bytes([ready]) + state()
    if rank_and_size()[1] == 1:
        return [own_message[1:]] if ready else None
    # A group with a CPU backend does not wait for the GPU; NCCL alone only supports CUDA tensors.
    device = torch.device("cpu" if "cpu:" in dist.get_backend_config() else "cuda")
    sent = torch.frombuffer(bytearray(own_message), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(rank_and_size()[1])]
    dist.all_gather(received, sent)
    messages = [bytes(one.cpu().tolist()) for one in received]
    return [one[1:] for one in messages] if all(one[0] for one in messages) else None


def state() -> bytes:
    """This rank's random state; it has the same length on all ranks."""
    cuda = bytes(1 + _CUDA)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = b"\1" + bytes(torch.cuda.get_rng_state().tolist())[:_CUDA].ljust(_CUDA, b"\0")
    return random_state.state() + cuda + bytes(torch.get_rng_state().tolist())


def as_tensors(states: list[bytes]) -> list[dict[str, torch.Tensor]]:
    """The random states in the form of the file, by rank."""
    by_rank = []
    for state in states:
        host, of_torch = state[: random_state.SIZE], state[random_state.SIZE :]
        one = {"host": _bytes(host), "torch": _bytes(of_torch[1 + _CUDA :])}
        if of_torch[0]:
            one["cuda"] = _bytes(of_torch[1 : 1 + _CUDA])
        by_rank.append(one)
    return by_rank


def load(saved: list[dict[str, torch.Tensor]]) -> None:
    """Each rank loads its own state. In a group of another size, new states are derived from the saved ones and the
    rank."""
    rank, world = rank_and_size()
    if len(saved) == world:
        one: dict[str, Any] = {name: value.clone() for name, value in saved[rank].items()}
        random_state.load(bytes(one["host"].tolist()))
        torch.set_rng_state(one["torch"])
        if "cuda" in one and torch.cuda.is_available():
            torch.cuda.set_rng_state(one["cuda"])
        return
    all_states = b"".join(bytes(one["torch"].tolist()) for one in saved)
    seed = random_state.derived(all_states, rank, world)
    random_state.seed(seed)
    torch.manual_seed(seed)


def _bytes(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)
