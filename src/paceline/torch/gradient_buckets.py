"""DDP's buckets: after its first step DDP rebuilds its gradient buckets, in the order in which gradients arrived.

The buckets determine the order of summation over three or more ranks, and so the last bits of every gradient. A
restarted process would take its first step with the initial buckets, while the process it replaces had already rebuilt
them. Therefore the order is saved in the snapshot, and before the first step it is replayed to DDP: a backward pass of
zeros.

`find_unused_parameters=True` never rebuilds buckets, and does not need this. `static_graph=True` treats the first pass
as the model, so nothing is replayed: there, the first step after a restart may differ in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def order(model: Any) -> list[int] | None:
    """The order in which gradients arrived, as indices of parameters. All ranks must call it."""
    model = _ddp(model)
    if model is None:
        return None
    try:
        model.reducer._rebuild_buckets()  # due after the first step; the second one would do it
        if not model._get_ddp_logging_data().get("has_rebuilt_buckets"):
            model.logger.set_runtime_stats_and_log()  # it logs before it rebuilds, so it is one step behind
        logged = model._get_ddp_logging_data()
        if not logged.get("has_rebuilt_buckets"):
            return None
        return [int(number) for number in logged["rebuilt_per_bucket_param_indices"].replace(",", " ").split()]
    except (AttributeError, KeyError):  # torch has no public interface for this
        return None


def replay(model: Any, saved_order: list[int] | None) -> None:
    """Make DDP rebuild its buckets in that order. Call it before the state is restored: it has no other effect."""
    model = _ddp(model)
    if saved_order is None or model is None:
        return
    ignored = model.parameters_to_ignore
    parameters = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    if sorted(saved_order) != list(range(len(parameters))) or not hasattr(model, "_post_forward"):
        return
    grads = [one.grad for one in parameters]
    with torch.enable_grad():
        model._pre_forward()
        loss = torch.zeros((), device=parameters[0].device)
        for number in reversed(saved_order):  # the backward pass starts with what was computed last
            loss = loss + (parameters[number] * 0).sum().to(loss)
        model._post_forward(loss).backward()
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad


def _ddp(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # torch.compile
    return model if isinstance(model, DistributedDataParallel) and not model.static_graph else None
