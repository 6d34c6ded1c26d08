"""Snapshots of JAX training: the state, any tree of arrays, written in the background.

    order = paceline.Shards(size=len(data), batch=64)
    with Snapshots(every=100, order=order) as snapshots:
        state, step = snapshots.restore(state)
        for n, batch in enumerate(batches, step + 1):
            state = train_step(state, batch)
            snapshots.step(n, state, loss=loss)

Outside a run nothing is written or restored. In a run all processes must call the same methods in the same order, after
`jax.distributed.initialize`. Random keys belong in the state. A snapshot consists of .npy files and JSON.
"""

from __future__ import annotations

import base64
import platform
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from paceline.jax import snapshot_files
from paceline.jax.leaves import describe, flatten, leaves_to_write
from paceline.jax.state_copy import StateCopy
from paceline.runtime import random_state, restore_stages
from paceline.runtime.group_save import is_stopping, should_save
from paceline.runtime.report import report_last_step, report_step
from paceline.runtime.save_schedule import Every, SaveSchedule
from paceline.runtime.shards import Shards
from paceline.runtime.snapshot_folders import Background, in_a_run, restored, save_snapshot
from paceline.runtime.snapshot_mismatches import Mismatches, SnapshotMismatch, SnapshotRefused

if TYPE_CHECKING:
    from paceline.jax.exporting import export, load

__all__ = ["SnapshotMismatch", "SnapshotRefused", "Snapshots", "export", "load"]


class Snapshots:
    """Takes and restores snapshots of a state.

    Every process writes the shards of which it has the first replica; any number of processes can restore them.
    Training waits while the state is copied to host memory; a thread then writes the files.
    """

    def __init__(self, every: Every = None, order: Shards | None = None) -> None:
        """`every`: steps between snapshots, or a duration such as "30s"; None: only on request, or when a task is about
        to be stopped."""
        self.skipped = 0  # snapshots that were not taken when due, because the last one was still being written
        self._schedule, self._order = SaveSchedule(every), order
        self._background, self._state_copy = Background(), StateCopy()
        self._postponed: tuple[int, Any, dict[str, Any]] | None = None  # step, state and metrics of an overdue snapshot
        self._prepared = False

    @restore_stages.reported
    def restore(self, state: Any, partial: bool = False) -> tuple[Any, int]:
        """The saved state, on the devices and with the sharding of `state`, and the number of completed steps.

        If there is nothing to restore, returns `state` and 0. `state` may contain `jax.ShapeDtypeStruct` instead of
        arrays. If the snapshot does not fit, SnapshotMismatch lists the names. `partial`: restore what fits; everything
        else is taken from `state`, and a warning lists it.

        Settings that are not part of the state, such as those of optax, always come from the program. Settings in the
        state (`optax.inject_hyperparams`) come from the snapshot, like the whole state.
        """
        folder = restored()
        if folder is None:
            return state, 0
        saved = snapshot_files.Saved(folder)
        step = int(saved.about["step"])
        ours = dict(flatten(state))
        mismatches, fitting = Mismatches(), set()
        mismatches.missing += [path for path in ours if path not in saved.leaves]
        mismatches.unexpected += [path for path in saved.leaves if path not in ours]
        for path, value in ours.items():
            if path in saved.leaves and mismatches.compare(
                path, saved.leaves[path].type_and_shape(), describe(path, value).type_and_shape()
            ):
                fitting.add(path)
        order_fits = mismatches.order(saved.about["order"], self._order)
        mismatches.raise_or_warn(step, partial, jax.process_index() == 0)
        if order_fits and self._order is not None:
            self._order.load(saved.about["order"])
        leaves = [_load_leaf(saved, path, value) if path in fitting else value for path, value in ours.items()]
        _load_random_state([base64.b64decode(index["random"]) for index in saved.indices])
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(state), leaves), step

    def step(self, n: int, state: Any, /, **metrics: Any) -> bool:
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
        if not self._prepared and self._schedule.is_periodic:
            self._prepared = True
            self._state_copy.prepare(leaves_to_write(state))
        due = is_requested or is_time or self._schedule.is_due(n)
        if stopping:
            self._save(n, state, metrics, urgent=True)
        elif due or self._postponed is not None:
            began = time.monotonic()
            if _all_ready(not self._background.busy()):
                self._take(n, state, metrics, began)
            else:
                self.skipped += due
                self._postponed = (n, state, metrics)
        return stopping

    def save(self, n: int, state: Any, /, **metrics: Any) -> None:
        """Take a snapshot now; if the last one is still being written, wait for it first."""
        self._save(n, state, metrics, urgent=False)

    def _save(self, n: int, state: Any, metrics: dict[str, Any], urgent: bool) -> None:
        if in_a_run():
            began = time.monotonic()
            self._background.settle()
            self._take(n, state, metrics, began, urgent)

    def close(self) -> None:
        """Take a postponed snapshot, if any, and wait until everything is written; raises if that failed."""
        report_last_step()
        if self._postponed is not None:
            n, state, metrics = self._postponed
            self.save(n, state, **metrics)
        try:
            self._background.wait()
        finally:
            self._state_copy.free()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # other processes may have ended: do nothing that needs them
            self._background.settle()
            self._state_copy.free()

    def _take(self, n: int, state: Any, metrics: dict[str, Any], began: float, urgent: bool = False) -> None:
        """`began`: since when training waits for it."""
        self._postponed = None
        self._schedule.taken()
        numbers = {name: float(value) for name, value in metrics.items()}
        leaves = leaves_to_write(state)
        self._state_copy.copy(leaves)
        process, processes = jax.process_index(), jax.process_count()
        order = None if self._order is None else self._order.state()
        about = {"step": n, "order": order, "random": base64.b64encode(random_state.state()).decode()}
        versions = {"python": platform.python_version(), "jax": jax.__version__}

        def write(folder: Path) -> None:
            snapshot_files.write(folder, leaves, about, process, processes)

        stall = time.monotonic() - began
        self._background.start(n, lambda: save_snapshot(write, n, processes, numbers, versions, stall), urgent)


def _load_leaf(saved: snapshot_files.Saved, path: str, like: Any) -> Any:
    leaf = saved.leaves[path]
    if leaf.kind == "plain":
        return leaf.value
    if leaf.kind == "key":
        data = like if isinstance(like, jax.ShapeDtypeStruct) else jax.random.key_data(like)
        return jax.random.wrap_key_data(_array(saved, path, data), impl=leaf.value)
    return _array(saved, path, like)


def _array(saved: snapshot_files.Saved, path: str, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return saved.whole(path)
    if isinstance(like, np.generic):
        return saved.whole(path)[()]
    if like.sharding is None or not getattr(like, "committed", True):  # JAX may move it to another device
        return jax.numpy.asarray(saved.whole(path))
    return jax.make_array_from_callback(saved.shape(path), like.sharding, lambda index: saved.region(path, index))


def _all_ready(ready: bool) -> bool:
    """Whether all processes are ready; all of them must call it."""
    if jax.process_count() == 1:
        return ready
    return bool(multihost_utils.process_allgather(np.array(ready)).all())


def _load_random_state(saved: list[bytes]) -> None:
    """Each process loads its own state. In a group of another size, new states are derived from the saved ones."""
    process, processes = jax.process_index(), jax.process_count()
    if len(saved) == processes:
        random_state.load(saved[process])
    else:
        random_state.seed(random_state.derived(b"".join(saved), process, processes))


def __getattr__(name: str) -> Any:
    """Imported on first use: training does not need them."""
    if name in ("export", "load"):
        from paceline.jax import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
