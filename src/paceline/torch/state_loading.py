"""Restores a saved state into objects: everything is compared first, then what fits is restored."""

from __future__ import annotations

from typing import Any, Callable

import torch

from paceline.runtime.snapshot_mismatches import Mismatches
from paceline.torch import gpu_load
from paceline.torch.snapshot_files import Saved, is_dtensor, local_pieces, shape_of


def describe(item: Any) -> dict[str, Any] | None:
    """What a check needs and a state dict lacks: an optimizer's type and the shapes of its parameters."""
    if not isinstance(item, torch.optim.Optimizer):
        return None
    shapes = [[list(one.shape) for one in group["params"]] for group in item.param_groups]
    return {"kind": type(item).__name__, "shapes": shapes}


def settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that a program passed to an optimizer, per group; with a schedule, the initial learning rate."""
    plain_settings = []
    for group in groups:
        initial = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        values = {key: one.item() if _is_number(one) else one for key, one in initial.items()}
        plain = (bool, int, float, str, tuple)
        plain_settings.append(
            {key: one for key, one in values.items() if key != "initial_lr" and isinstance(one, plain)}
        )
    return plain_settings


def apply_settings(name: str, item: Any, ours: Any, theirs: Any, schedulers: list[Any] | None) -> list[str]:
    """The settings that differ, for a warning.

    `schedulers`, of this optimizer: apply the program's settings, scaled by the progress of the schedule; None: keep
    the restored ones.
    """
    differences = []
    for number, (group, mine, their) in enumerate(zip(item.param_groups, ours, theirs)):
        for key in sorted(key for key in mine.keys() & their.keys() if mine[key] != their[key]):
            differences.append(f"{name}/group {number}/{key} ({their[key]} in the snapshot, {mine[key]} here)")
            if schedulers is None:
                continue
            value = mine[key]
            if key == "lr" and schedulers:
                group["initial_lr"] = value
                value = value * float(group["lr"]) / their["lr"] if their["lr"] else value
            if _is_number(group[key]):
                group[key].fill_(value)
            else:
                group[key] = value
    for scheduler in schedulers or () if differences else ():
        for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
            each._last_lr = [group["lr"] for group in item.param_groups]
            if hasattr(each, "base_lrs"):
                each.base_lrs = [group.get("initial_lr", group["lr"]) for group in item.param_groups]
    return differences


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def prepare(name: str, item: Any, saved: Saved, about: Any, mismatches: Mismatches) -> Callable[[], Any]:
    """A function that restores what fits; nothing is changed yet. Objects of other types check their state on load."""
    value = saved.tree[name]
    if isinstance(item, torch.nn.Module):
        fitting = _fitting(name, item.state_dict(), saved, value, mismatches)
        return lambda: _restore_module(item, fitting, saved, value)
    if isinstance(item, torch.optim.Optimizer):
        fits = _same_optimizer(name, item, about, mismatches)
        return lambda: fits and _restore_optimizer(item, saved, value)
    return lambda: item.load_state_dict(saved.whole(value))


def _fitting(name: str, ours: Any, saved: Saved, theirs: Any, mismatches: Mismatches) -> list[str]:
    mismatches.missing += [f"{name}/{key}" for key in ours if key not in theirs]
    mismatches.unexpected += [f"{name}/{key}" for key in theirs if key not in ours]
    return [
        key
        for key in ours
        if key in theirs and mismatches.compare(f"{name}/{key}", saved.describe(theirs[key]), saved.describe(ours[key]))
    ]


def _restore_module(module: torch.nn.Module, names: list[str], saved: Saved, theirs: Any) -> None:
    ours = module.state_dict()
    fitting: Any = type(ours)()
    fitting._metadata = getattr(theirs, "_metadata", {})
    copies: list[gpu_load.Pair] = []
    for key in names:
        if is_dtensor(ours[key]):
            fitting[key] = _filled(ours[key], saved, theirs[key], copies)
        elif isinstance(theirs[key], torch.Tensor):
            fitting[key] = _on_gpu(ours[key], theirs[key], copies)  # the module copies
        else:
            fitting[key] = saved.whole(theirs[key])
    gpu_load.copy_all(copies)
    module.load_state_dict(fitting, strict=False)


def _same_optimizer(name: str, item: Any, about: Any, mismatches: Mismatches) -> bool:
    before = len(mismatches.different)
    ours, theirs = describe(item), about or describe(item)
    assert ours is not None
    assert theirs is not None
    mismatches.compare(name, theirs["kind"], ours["kind"])
    their_counts, our_counts = ([len(group) for group in shapes] for shapes in (theirs["shapes"], ours["shapes"]))
    if mismatches.compare(name, their_counts, our_counts, "parameters per group: "):
        for number, groups in enumerate(zip(theirs["shapes"], ours["shapes"])):
            for index, (one, other) in enumerate(zip(*groups)):
                mismatches.compare(f"{name}/group {number}/parameter {index}", one, other, "shape ")
    return len(mismatches.different) == before


def _restore_optimizer(item: Any, saved: Saved, theirs: Any) -> bool:
    parameters = [one for group in item.param_groups for one in group["params"]]
    numbers = [one for group in theirs["param_groups"] for one in group["params"]]
    state: dict[Any, Any] = {}
    copies: list[gpu_load.Pair] = []
    for number, parameter in zip(numbers, parameters):
        if number in theirs["state"]:
            values = theirs["state"][number]
            state[number] = {key: _placed_like(parameter, saved, value, copies) for key, value in values.items()}
    gpu_load.copy_all(copies)
    others = {number: saved.whole(value) for number, value in theirs["state"].items() if number not in state}
    without_state = {key: saved.whole(value) for key, value in theirs.items() if key != "state"}
    item.load_state_dict({**without_state, "state": {**state, **others}})
    return True


def _placed_like(parameter: torch.Tensor, saved: Saved, value: Any, copies: list[gpu_load.Pair]) -> Any:
    """A value of an optimizer's state: if it has the shape of its parameter, sharded or on a GPU as well."""
    if shape_of(value) == list(parameter.shape):
        if is_dtensor(parameter):
            target = torch.zeros_like(parameter.detach(), dtype=saved.dtype(value))
            return _filled(target, saved, value, copies)
        if isinstance(value, torch.Tensor):
            placed = _on_gpu(parameter, value, copies)
            return saved.whole(value) if placed is value else placed
    return saved.whole(value)


def _on_gpu(like: torch.Tensor, source: torch.Tensor, copies: list[gpu_load.Pair]) -> torch.Tensor:
    """A tensor on the GPU of `like`, to be filled by `copies`; the source itself if that would not be faster.

    There is memory for it: the gradients, which are as large, do not exist yet.
    """
    if not gpu_load.is_fast(like, source):
        return source
    target = torch.empty_like(source, device=like.device)
    copies.append((target, source))
    return target


def _filled(target: torch.Tensor, saved: Saved, value: Any, copies: list[gpu_load.Pair]) -> torch.Tensor:
    """A sharded tensor, whose part of this rank is to be filled by `copies`."""
    for offset, local in local_pieces(target):
        copies.append((local, saved.region(value, offset, local.shape)))
    return target
