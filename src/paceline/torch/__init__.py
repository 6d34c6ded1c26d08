"""Snapshots of torch training: everything that is needed to go on, written while training goes on.

    order = paceline.Shards(size=len(data), batch=64)
    with Snapshots({"model": model, "optimizer": optimizer}, every=100, order=order) as snapshots:
        done = snapshots.restore()
        for n, batch in enumerate(batches, done + 1):
            ...
            snapshots.step(n, loss=loss)

Outside a run nothing is written and nothing restored. In a run all tasks have to call the same methods in the same
order. A snapshot is made of torch.save's own files: `torch.load(folder / "state.pt", weights_only=True)` reads them.

Going on bit for bit, with as many tasks, asks this of a program:
- everything with a state is in the dictionary: schedulers and scalers too; and DDP models as such, not their modules.
- `restore()` comes last, right before the loop. A `DataLoader` has a `generator=` of its own: it draws a number from
  torch's whenever it begins, and a resumed epoch begins once more. What workers draw themselves is not the same again.
- what runs is deterministic: see `torch.use_deterministic_algorithms`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime.contract import Background, from_another_run, in_a_run, restored, writing
from paceline.runtime.leaving import leaving
from paceline.runtime.misfits import Misfits, SnapshotMismatch, SnapshotRefused
from paceline.runtime.report import say
from paceline.runtime.shards import Shards
from paceline.torch import buckets, files, fit, group
from paceline.torch.host import Host
from paceline.torch.tree import SnapshotUnsafe

if TYPE_CHECKING:
    from paceline.torch.exporting import export, load

__all__ = ["SnapshotMismatch", "SnapshotRefused", "SnapshotUnsafe", "Snapshots", "export", "load"]

_OURS = "paceline"  # beside the items in state.pt


class Snapshots:
    """Takes and restores snapshots of anything with `state_dict` and `load_state_dict`.

    Rank 0 writes for all. Where tensors are sharded (`fully_shard`: DTensors), every rank writes its part, and any
    number of ranks can restore it; what is not sharded is taken to be the same in all, and rank 0's counts. Training is
    held while the state is copied to host memory; a thread writes.
    """

    def __init__(self, items: Mapping[str, Any], every: int | None = None, order: Shards | None = None) -> None:
        """`every`: steps between snapshots; None: only when asked for, or when a task is about to go."""
        if every is not None and every < 1:
            raise ValueError(f"every {every} steps: at least 1")
        if _OURS in items:
            raise ValueError(f"the name {_OURS!r} is taken: give that item another")
        for name, item in items.items():
            _check(name, item)
        self.skipped = 0  # not taken when they were due, because the last one was still being written
        self._items = dict(items)
        self._every, self._order = every, order
        self._background, self._host = Background(), Host()
        self._late: tuple[int, dict[str, Any]] | None = None  # was due, and is still to be taken
        self._prepared = False
        self._given: dict[str, Any] = {}  # settings of optimizers, before anything was restored

    def restore(self, partial: bool = False) -> int:
        """How many steps are done: 0 where there is nothing to restore.

        Where the snapshot does not fit, SnapshotMismatch lists the names, and nothing is changed. `partial`: what fits
        is restored all the same, tensor by tensor of a model, an optimizer as a whole; the rest stays as the program
        made it, and a warning lists it.

        Settings of an optimizer (lr, weight_decay, ...) that the program gives otherwise than the one that took the
        snapshot are told in a warning. Those of the snapshot count; but where a run starts from another's
        (`snapshots.from`), the program's do. Those of schedulers and other objects are restored as part of them.
        """
        optimizers = {name: item for name, item in self._items.items() if isinstance(item, torch.optim.Optimizer)}
        self._given = {name: fit.given(item.param_groups) for name, item in optimizers.items()}
        folder = restored()
        if folder is None:
            return 0
        saved = files.Saved(folder)
        about = saved.tree.get(_OURS, {})
        step = int(about["step"]) if "step" in about else _step_of(folder.name)
        misfits = Misfits()
        misfits.unexpected += [name for name in saved.tree if name not in self._items and name != _OURS]
        loads = {}
        for name, item in self._items.items():
            if name in saved.tree:
                loads[name] = fit.prepare(name, _inner(item), saved, about.get("made", {}).get(name), misfits)
            else:
                misfits.missing.append(name)
        ordered = misfits.order(about.get("order"), self._order)
        rank, world = group.place()
        misfits.tell(step, partial, rank == 0)
        if len(about.get("random", ())) == world:
            for name, item in self._items.items():
                buckets.play(item, about.get("buckets", {}).get(name))
        done = {name for name, load in loads.items() if load()}
        self._settle({name: item for name, item in optimizers.items() if name in done}, saved, rank == 0)
        if ordered and self._order is not None:
            self._order.load(about["order"])
        if about.get("random"):
            group.load(about["random"])
        return step

    def _settle(self, optimizers: dict[str, Any], saved: files.Saved, first: bool) -> None:
        anew, told = from_another_run(), []
        for name, item in optimizers.items():
            known = saved.tree.get(_OURS, {}).get("given", {}).get(name)
            theirs = known or fit.given(saved.tree[name]["param_groups"])
            schedulers = [one for one in self._items.values() if getattr(one, "optimizer", None) is item]
            told += fit.settle(name, item, self._given[name], theirs, schedulers if anew else None)
            self._given[name] = self._given[name] if anew else theirs
        if told and first:
            whose = "of the program" if anew else "in the snapshot"
            say(f"settings differ, and those {whose} count: {', '.join(told)}")

    def step(self, n: int, /, **metrics: Any) -> bool:
        """Step `n` is done: takes a snapshot where one is due. True: it was taken since one of the group has to
        go. Go on: Paceline ends the task once the snapshot is committed.

        A snapshot that is due while the last one is still being written is skipped, and taken after the next step.
        """
        going = leaving(n)
        if not in_a_run():
            return going
        if going:
            self._save(n, metrics, urgent=True)
            return True
        if not self._prepared and self._every is not None:
            self._prepared = True  # not earlier: now the optimizer has its state, too
            self._host.prepare(self._mine(self._tree(n, [group.state()] * group.place()[1]))[0])
        due = self._every is not None and n % self._every == 0
        if due or self._late is not None:
            states = group.meet(not self._background.busy())
            if states is None:
                self.skipped += due
                self._late = (n, metrics)
            else:
                self._take(n, metrics, states)
        return False

    def save(self, n: int, /, **metrics: Any) -> None:
        """Take one now; where the last one is still being written, once it is."""
        self._save(n, metrics, urgent=False)

    def _save(self, n: int, metrics: dict[str, Any], urgent: bool) -> None:
        if in_a_run():
            self._background.settle()
            states = group.meet(True)
            assert states is not None
            self._take(n, metrics, states, urgent)

    def close(self) -> None:
        """Waits until all is written, with the last one that was due; raises where that failed."""
        if self._late is not None:
            n, metrics = self._late
            self.save(n, **metrics)
        try:
            self._background.wait()
        finally:
            self._host.free()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # others may be gone: nothing that needs them
            self._background.settle()
            self._host.free()

    def _take(self, n: int, metrics: dict[str, Any], states: list[bytes], urgent: bool = False) -> None:
        self._late = None
        numbers = {name: _number(value) for name, value in metrics.items()}
        mine, parts = self._mine(self._tree(n, states))
        if not mine:
            return
        held = self._host.hold(mine)
        versions = {"python": platform.python_version(), "torch": torch.__version__}

        def write() -> None:
            with writing(n, parts, numbers, versions) as folder:
                for name, content in held.items():
                    torch.save(content, folder / name)

        self._background.start(n, write, urgent)

    def _tree(self, n: int, states: list[bytes]) -> dict[str, Any]:
        """All ranks make it: it may need all of them."""
        about = {
            "step": n,
            "order": None if self._order is None else self._order.state(),
            "random": group.as_tensors(states),
            "made": {name: fit.describe(item) for name, item in self._items.items()},
            "given": self._given,
            "buckets": {name: buckets.order(item) for name, item in self._items.items()},
        }
        return {**{name: _inner(item).state_dict() for name, item in self._items.items()}, _OURS: about}

    def _mine(self, tree: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """What this rank writes, by file; and how many ranks write."""
        rank, world = group.place()
        whole, parts = files.split(tree)
        mine = {} if rank else {files.STATE: whole}
        if parts is not None:
            mine[files.shard_name(rank, world)] = parts
        return mine, 1 if parts is None else world


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _step_of(name: str) -> int:
    """Of a snapshot that a program wrote without this module."""
    found = re.match(r"step-(\d+)", name)
    return int(found[1]) if found else 0


def _inner(item: Any) -> Any:
    """The model itself: how it is wrapped may be another way the next time."""
    item = getattr(item, "_orig_mod", item)  # torch.compile
    item = item.module if isinstance(item, DistributedDataParallel) else item
    return getattr(item, "_orig_mod", item)


def _check(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise TypeError(f"{name} has no state_dict and load_state_dict: it is a {type(item).__name__}")
    if isinstance(item, torch.nn.Module):
        for module in item.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise TypeError(f"{name} is sharded by FullyShardedDataParallel: use torch's fully_shard instead")


def __getattr__(name: str) -> Any:
    """Loaded when they are used: training does not need them."""
    if name in ("export", "load"):
        from paceline.torch import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
