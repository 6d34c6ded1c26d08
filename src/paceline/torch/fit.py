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


def given(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of an optimizer as a program gives them, a group each; of a schedule, where it begins."""
    found = []
    for group in groups:
        settings = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        values = {key: one.item() if _is_number(one) else one for key, one in settings.items()}
        plain = (bool, int, float, str, tuple)
        found.append({key: one for key, one in values.items() if key != "initial_lr" and isinstance(one, plain)})
    return found


def settle(name: str, item: Any, ours: Any, theirs: Any, schedulers: list[Any] | None) -> list[str]:
    """Which settings differ. `schedulers`, of this optimizer: the program's count from now on, where a schedule is by
    now included; None: the restored ones stay."""
    told = []
    for number, (group, mine, their) in enumerate(zip(item.param_groups, ours, theirs)):
        for key in sorted(key for key in mine.keys() & their.keys() if mine[key] != their[key]):
            told.append(f"{name}/group {number}/{key} ({their[key]} in the snapshot, {mine[key]} here)")
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
    for scheduler in schedulers or () if told else ():
        for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
            each._last_lr = [group["lr"] for group in item.param_groups]
            if hasattr(each, "base_lrs"):
                each.base_lrs = [group.get("initial_lr", group["lr"]) for group in item.param_groups]
    return told


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def prepare(name: str, item: Any, saved: Saved, about: Any, misfits: Misfits) -> Callable[[], Any]:
    """What restores as much of it as fits; changes nothing yet. Of other objects, only they know what fits."""
    value = saved.tree[name]
    if isinstance(item, torch.nn.Module):
        fitting = _fitting(name, item.state_dict(), saved, value, misfits)
        return lambda: _restore_module(item, fitting, saved, value)
    if isinstance(item, torch.optim.Optimizer):
        fits = _same_optimizer(name, item, about, misfits)
        return lambda: fits and _restore_optimizer(item, saved, value)
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


def _restore_optimizer(item: Any, saved: Saved, theirs: Any) -> bool:
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
    return True


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
