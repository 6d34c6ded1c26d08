"""Putting a saved state back into objects: all is compared first, then what fits is restored."""

from __future__ import annotations

from typing import Any, Callable

import torch

from paceline.runtime.misfits import Misfits
from paceline.torch.files import Saved, is_dtensor, local_pieces, shape_of


def describe(item: Any) -> dict[str, Any] | None:
    """What a state dict does not say and a check needs: an optimizer's kind and the shapes of its parameters."""
    if not isinstance(item, torch.optim.Optimizer):
        return None
    shapes = [[list(one.shape) for one in group["params"]] for group in item.param_groups]
    return {"kind": type(item).__name__, "shapes": shapes}


def prepare(name: str, item: Any, saved: Saved, about: Any, misfits: Misfits) -> Callable[[], None]:
    """What restores as much of it as fits; changes nothing yet. Of other objects, only they know what fits."""
    value = saved.tree[name]
    if isinstance(item, torch.nn.Module):
        fitting = _fitting(name, item.state_dict(), saved, value, misfits)
        return lambda: _restore_module(item, fitting, saved, value)
    if isinstance(item, torch.optim.Optimizer):
        fits = _same_optimizer(name, item, about, misfits)
        return lambda: _restore_optimizer(item, saved, value) if fits else None
    return lambda: item.load_state_dict(saved.whole(value))


def _fitting(name: str, ours: Any, saved: Saved, theirs: Any, misfits: Misfits) -> list[str]:
    misfits.missing += [f"{name}/{key}" for key in ours if key not in theirs]
    misfits.unexpected += [f"{name}/{key}" for key in theirs if key not in ours]
    return [
        key
        for key in ours
        if key in theirs and misfits.compare(f"{name}/{key}", saved.words(theirs[key]), saved.words(ours[key]))
    ]


def _restore_module(module: torch.nn.Module, names: list[str], saved: Saved, theirs: Any) -> None:
    ours = module.state_dict()
    fitting: Any = type(ours)()
    fitting._metadata = getattr(theirs, "_metadata", {})
    for key in names:
        if is_dtensor(ours[key]):
            fitting[key] = _filled(ours[key], saved, theirs[key])
        elif isinstance(theirs[key], torch.Tensor):
            fitting[key] = theirs[key]  # the module copies
        else:
            fitting[key] = saved.whole(theirs[key])
    module.load_state_dict(fitting, strict=False)


def _same_optimizer(name: str, item: Any, about: Any, misfits: Misfits) -> bool:
    before = len(misfits.different)
    mine, made = describe(item), about or describe(item)
    assert mine is not None
    assert made is not None
    misfits.compare(name, made["kind"], mine["kind"])
    theirs_count, count = ([len(group) for group in shapes] for shapes in (made["shapes"], mine["shapes"]))
    if misfits.compare(name, theirs_count, count, "parameters a group: "):
        for number, groups in enumerate(zip(made["shapes"], mine["shapes"])):
            for index, (one, other) in enumerate(zip(*groups)):
                misfits.compare(f"{name}/group {number}/parameter {index}", one, other, "shape ")
    return len(misfits.different) == before


def _restore_optimizer(item: Any, saved: Saved, theirs: Any) -> None:
    parameters = [one for group in item.param_groups for one in group["params"]]
    numbers = [one for group in theirs["param_groups"] for one in group["params"]]
    state: dict[Any, Any] = {}
    for number, parameter in zip(numbers, parameters):
        if number in theirs["state"]:
            known = theirs["state"][number]
            state[number] = {key: _beside(parameter, saved, value) for key, value in known.items()}
    others = {number: saved.whole(value) for number, value in theirs["state"].items() if number not in state}
    rest = {key: saved.whole(value) for key, value in theirs.items() if key != "state"}
    item.load_state_dict({**rest, "state": {**state, **others}})


def _beside(parameter: torch.Tensor, saved: Saved, value: Any) -> Any:
    """A value of an optimizer's state; sharded as its parameter is, where it has its shape."""
    if is_dtensor(parameter) and shape_of(value) == list(parameter.shape):
        return _filled(torch.zeros_like(parameter.detach(), dtype=saved.dtype(value)), saved, value)
    return saved.whole(value)


def _filled(target: torch.Tensor, saved: Saved, value: Any) -> torch.Tensor:
    with torch.no_grad():
        for offset, local in local_pieces(target):
            local.copy_(saved.region(value, offset, local.shape))
    return target
