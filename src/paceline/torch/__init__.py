"""Snapshots of torch training: everything needed to resume, written in the background.

    order = paceline.Shards(size=len(data), batch=64)
    with Snapshots({"model": model, "optimizer": optimizer}, every=100, order=order) as snapshots:
        step = snapshots.restore()
        for n, batch in enumerate(batches, step + 1):
            ...
            snapshots.step(n, loss=loss)

Outside a run nothing is written or restored. In a run all tasks must call the same methods in the same order. A
snapshot consists of plain torch.save files: `torch.load(folder / "state.pt", weights_only=True)` reads them.

To resume bit for bit, with the same number of tasks, a program has to meet these conditions:
- The dictionary contains every object with state, including schedulers and scalers. Pass DDP models themselves, not
  their modules.
- `restore()` comes last, right before the loop.
- A `DataLoader` has its own `generator=`. Otherwise each new iterator draws a number from torch's global generator, and
  a resumed epoch creates one more iterator. Random numbers drawn by loader workers are not reproduced.
- All operations are deterministic: see `torch.use_deterministic_algorithms`.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime import restore_stages
from paceline.runtime.group_save import is_stopping, should_save
from paceline.runtime.report import report_last_step, report_step, warn
from paceline.runtime.save_schedule import Every, SaveSchedule
from paceline.runtime.shards import Shards
from paceline.runtime.snapshot_folders import Background, from_another_run, in_a_run, restored, save_snapshot
from paceline.runtime.snapshot_mismatches import Mismatches, SnapshotMismatch, SnapshotRefused
from paceline.torch import gradient_buckets, group, snapshot_files, state_loading
from paceline.torch.state_copy import StateCopy
from paceline.torch.state_trees import SnapshotUnsafe

if TYPE_CHECKING:
    from paceline.torch.exporting import export, load

__all__ = ["SnapshotMismatch", "SnapshotRefused", "SnapshotUnsafe", "Snapshots", "export", "load"]

_OURS = "paceline"  # our own key in state.pt, next to the items


class Snapshots:
    """Takes and restores snapshots of anything with `state_dict` and `load_state_dict`.

    Rank 0 writes for all ranks. If tensors are sharded (`fully_shard`: DTensors), every rank writes its part, and any
    number of ranks can restore it; unsharded values are assumed to be the same on all ranks, and rank 0's are saved.
    Training waits while the state is copied to host memory; a thread then writes the files.
    """

    def __init__(self, items: Mapping[str, Any], every: Every = None, order: Shards | None = None) -> None:
        """`every`: steps between snapshots, or a duration such as "30s"; None: only on request, or when a task is about
        to be stopped."""
        if _OURS in items:
            raise ValueError(f"the name {_OURS!r} is reserved; rename this item")
        for name, item in items.items():
            _check(name, item)
        self.skipped = 0  # snapshots that were not taken when due, because the last one was still being written
        self._items = dict(items)
        self._schedule, self._order = SaveSchedule(every), order
        self._background, self._state_copy = Background(), StateCopy()
        self._postponed: tuple[int, dict[str, Any]] | None = None  # step and metrics of a snapshot that is overdue
        self._prepared = False
        self._program_settings: dict[str, Any] = {}  # settings of optimizers, before anything was restored

    @restore_stages.reported
    def restore(self, partial: bool = False) -> int:
        """Restore the snapshot of this run; return the number of completed steps, or 0 if there is no snapshot.

        If the snapshot does not fit, SnapshotMismatch lists the names, and nothing is changed. `partial`: restore what
        fits, tensor by tensor for a model, an optimizer only as a whole; everything else stays unchanged, and a warning
        lists it.

        A warning lists optimizer settings (lr, weight_decay, ...) that differ between this program and the one that
        took the snapshot. The snapshot's settings are used, except in a run that starts from another run
        (`snapshots.from`): there, the program's are. Settings of schedulers and other objects are restored with them.
        """
        optimizers = {name: item for name, item in self._items.items() if isinstance(item, torch.optim.Optimizer)}
        self._program_settings = {name: state_loading.settings(item.param_groups) for name, item in optimizers.items()}
        folder = restored()
        if folder is None:
            return 0
        saved = snapshot_files.Saved(folder)
        about = saved.tree.get(_OURS, {})
        step = int(about["step"]) if "step" in about else _step_of(folder.name)
        mismatches = Mismatches()
        mismatches.unexpected += [name for name in saved.tree if name not in self._items and name != _OURS]
        loads = {}
        for name, item in self._items.items():
            if name in saved.tree:
                loads[name] = state_loading.prepare(
                    name, _inner(item), saved, about.get("made", {}).get(name), mismatches
                )
            else:
                mismatches.missing.append(name)
        order_fits = mismatches.order(about.get("order"), self._order)
        rank, world = group.rank_and_size()
        mismatches.raise_or_warn(step, partial, rank == 0)
        if len(about.get("random", ())) == world:
            for name, item in self._items.items():
                gradient_buckets.replay(item, about.get("buckets", {}).get(name))
        restored_items = {name for name, load in loads.items() if load()}
        restored_optimizers = {name: item for name, item in optimizers.items() if name in restored_items}
        self._apply_settings(restored_optimizers, saved, rank == 0)
        if order_fits and self._order is not None:
            self._order.load(about["order"])
        if about.get("random"):
            group.load(about["random"])
        return step

    def _apply_settings(self, optimizers: dict[str, Any], saved: snapshot_files.Saved, is_first: bool) -> None:
        use_program_settings, differences = from_another_run(), []
        for name, item in optimizers.items():
            recorded = saved.tree.get(_OURS, {}).get("given", {}).get(name)
            theirs = recorded or state_loading.settings(saved.tree[name]["param_groups"])
            ours = self._program_settings[name]
            schedulers = [one for one in self._items.values() if getattr(one, "optimizer", None) is item]
            differences += state_loading.apply_settings(
                name, item, ours, theirs, schedulers if use_program_settings else None
            )
            self._program_settings[name] = ours if use_program_settings else theirs
        if differences and is_first:
            owner = "program" if use_program_settings else "snapshot"
            warn(f"settings differ; using those of the {owner}: {', '.join(differences)}")

    def step(self, n: int, /, **metrics: Any) -> bool:
        """Report that step `n` is complete, and take a snapshot if one is due. Returns True if it was taken because a
        task of the group is about to be stopped. Keep training: Paceline ends the task once the snapshot is committed.

        A snapshot that is due while the last one is still being written is skipped, and taken after the next step.
        """
        report_step(n, metrics)
        is_requested = should_save(n)
        stopping = is_requested and is_stopping()
        if not in_a_run():
            return stopping
        is_time = self._schedule.check_time()
        if stopping:
            self._save(n, metrics, urgent=True)
            return True
        if not self._prepared and self._schedule.is_periodic:
            self._prepared = True  # not earlier: now the optimizer has its state, too
            states = [group.state()] * group.rank_and_size()[1]
            self._state_copy.prepare(self._own_files(self._tree(n, states))[0])
        due = is_requested or is_time or self._schedule.is_due(n)
        if due or self._postponed is not None:
            began = time.monotonic()
            gathered = group.gather_if_ready(not self._background.busy())
            if gathered is None:
                self.skipped += due
                self._postponed = (n, metrics)
            else:
                self._take(n, metrics, gathered, began)
        return False

    def save(self, n: int, /, **metrics: Any) -> None:
        """Take a snapshot now; if the last one is still being written, wait for it first."""
        self._save(n, metrics, urgent=False)

    def _save(self, n: int, metrics: dict[str, Any], urgent: bool) -> None:
        if in_a_run():
            began = time.monotonic()
            self._background.settle()
            states = group.gather_if_ready(True)
            assert states is not None
            self._take(n, metrics, states, began, urgent)

    def close(self) -> None:
        """Take a postponed snapshot, if any, and wait until everything is written; raises if that failed."""
        report_last_step()
        if self._postponed is not None:
            n, metrics = self._postponed
            self.save(n, **metrics)
        try:
            self._background.wait()
        finally:
            self._state_copy.free()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may have ended: do nothing that needs them
            self._background.settle()
            self._state_copy.free()

    def _take(self, n: int, metrics: dict[str, Any], states: list[bytes], began: float, urgent: bool = False) -> None:
        """`began`: since when training waits for it."""
        self._postponed = None
        self._schedule.taken()
        numbers = {name: _number(value) for name, value in metrics.items()}
        files, parts = self._own_files(self._tree(n, states))
        if not files:
            return
        copied_files = self._state_copy.copy(files)
        versions = {"python": platform.python_version(), "torch": torch.__version__}

        def write(folder: Path) -> None:
            for name, content in copied_files.items():
                torch.save(content, folder / name)

        stall = time.monotonic() - began
        self._background.start(n, lambda: save_snapshot(write, n, parts, numbers, versions, stall), urgent)

    def _tree(self, n: int, states: list[bytes]) -> dict[str, Any]:
        """All ranks must call it: building it may need collectives."""
        about = {
            "step": n,
            "order": None if self._order is None else self._order.state(),
            "random": group.as_tensors(states),
            "made": {name: state_loading.describe(item) for name, item in self._items.items()},
            "given": self._program_settings,
            "buckets": {name: gradient_buckets.order(item) for name, item in self._items.items()},
        }
        return {**{name: _inner(item).state_dict() for name, item in self._items.items()}, _OURS: about}

    def _own_files(self, tree: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The contents of the files that this rank writes, by name; and how many ranks write files."""
        rank, world = group.rank_and_size()
        whole, parts = snapshot_files.split(tree)
        files = {} if rank else {snapshot_files.STATE: whole}
        if parts is not None:
            files[snapshot_files.shard_name(rank, world)] = parts
        return files, 1 if parts is None else world


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _step_of(name: str) -> int:
    """The step of a snapshot that a program wrote without this module."""
    match = re.match(r"step-(\d+)", name)
    return int(match[1]) if match else 0


def _inner(item: Any) -> Any:
    """The model without its wrappers, which may differ the next time."""
    item = getattr(item, "_orig_mod", item)  # torch.compile
    item = item.module if isinstance(item, DistributedDataParallel) else item
    return getattr(item, "_orig_mod", item)


def _check(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise TypeError(f"{name} has no state_dict and load_state_dict: its type is {type(item).__name__}")
    if isinstance(item, torch.nn.Module):
        for module in item.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise TypeError(
                    f"{name} uses FullyShardedDataParallel, which is not supported; use torch's fully_shard instead"
                )


def __getattr__(name: str) -> Any:
    """Imported on first use: training does not need them."""
    if name in ("export", "load"):
        from paceline.torch import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
