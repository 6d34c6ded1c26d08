"""DDP's buckets: after its first step DDP packs gradients anew, in the order in which they came.

How they are packed decides in which order three or more ranks are summed up, and so the last bits of every gradient. A
process that has been started again would take its first step with the first packing, where the one it replaces was long
past it. So the order goes into the snapshot, and before the first step it is played to DDP: a backward pass of zeros.

`find_unused_parameters=True` never packs anew, and needs nothing of this. `static_graph=True` counts the first pass as
the model, so none is played: there, the first step after a restart may differ in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def order(model: Any) -> list[int] | None:
    """In which order gradients came, by the number of the parameter. All ranks have to call it."""
    model = _ddp(model)
    if model is None:
        return None
    try:
        model.reducer._rebuild_buckets()  # after the first step it is due, and would be done by the second
        if not model._get_ddp_logging_data().get("has_rebuilt_buckets"):
            model.logger.set_runtime_stats_and_log()  # it looks before it packs, so it is a step behind
        said = model._get_ddp_logging_data()
        if not said.get("has_rebuilt_buckets"):
            return None
        return [int(number) for number in said["rebuilt_per_bucket_param_indices"].replace(",", " ").split()]
    except (AttributeError, KeyError):  # no public interface of torch tells it
        return None


def play(model: Any, known: list[int] | None) -> None:
    """Have DDP pack as it did. Before the state is restored: it leaves nothing but that behind."""
    model = _ddp(model)
    if known is None or model is None:
        return
    ignored = model.parameters_to_ignore
    parameters = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    if sorted(known) != list(range(len(parameters))) or not hasattr(model, "_post_forward"):
        return
    grads = [one.grad for one in parameters]
    with torch.enable_grad():
        model._pre_forward()
        loss = torch.zeros((), device=parameters[0].device)
        for number in reversed(known):  # what was computed last comes first on the way back
            loss = loss + (parameters[number] * 0).sum().to(loss)
        model._post_forward(loss).backward()
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad


def _ddp(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # torch.compile
    return model if isinstance(model, DistributedDataParallel) and not model.static_graph else None
