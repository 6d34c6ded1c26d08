"""Snapshots of JAX training: the state, any tree of arrays, written while training goes on.

    order = paceline.Shards(size=len(data), batch=64)
    with Snapshots(every=100, order=order) as snapshots:
        state, done = snapshots.restore(state)
        for n, batch in enumerate(batches, done + 1):
            state = train_step(state, batch)
            snapshots.step(n, state, loss=loss)

Outside a run nothing is written and nothing restored. In a run all processes have to call the same methods in the same
order, and `jax.distributed.initialize` comes before. Random keys belong into the state. A snapshot is made of .npy
files and JSON.
"""

from __future__ import annotations

import base64
import platform
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from paceline.jax import files
from paceline.jax.host import Host
from paceline.jax.leaves import described, flat, held
from paceline.runtime import chance
from paceline.runtime.contract import Background, in_a_run, restored, writing
from paceline.runtime.leaving import leaving
from paceline.runtime.misfits import Misfits, SnapshotMismatch, SnapshotRefused
from paceline.runtime.shards import Shards

if TYPE_CHECKING:
    from paceline.jax.exporting import export, load

__all__ = ["SnapshotMismatch", "SnapshotRefused", "Snapshots", "export", "load"]


class Snapshots:
    """Takes and restores snapshots of a state.

    Every process writes the shards that it is the first to hold; any number of processes can restore them. Training is
    held while the state is copied to host memory; a thread writes.
    """

    def __init__(self, every: int | None = None, order: Shards | None = None) -> None:
        """`every`: steps between snapshots; None: only when asked for, or when a task is about to go."""
        if every is not None and every < 1:
            raise ValueError(f"every {every} steps: at least 1")
        self.skipped = 0  # not taken when they were due, because the last one was still being written
        self._every, self._order = every, order
        self._background, self._host = Background(), Host()
        self._late: tuple[int, Any, dict[str, Any]] | None = None  # was due, and is still to be taken
        self._prepared = False

    def restore(self, state: Any, partial: bool = False) -> tuple[Any, int]:
        """The saved state, placed and sharded as this one is, and how many steps are done.

        Where there is nothing to restore: this state, and 0. `state` may hold `jax.ShapeDtypeStruct` for arrays.
        Where the snapshot does not fit, SnapshotMismatch lists the names. `partial`: what fits is taken all the same,
        the rest is as in `state`, and a warning lists it.

        Settings that are not in the state, as those of optax, are the program's, whatever the snapshot was made with.
        Those that are (`optax.inject_hyperparams`) come from the snapshot, as all of the state.
        """
        folder = restored()
        if folder is None:
            return state, 0
        saved = files.Saved(folder)
        step = int(saved.about["step"])
        ours = dict(flat(state))
        misfits, fitting = Misfits(), set()
        misfits.missing += [path for path in ours if path not in saved.leaves]
        misfits.unexpected += [path for path in saved.leaves if path not in ours]
        for path, value in ours.items():
            if path in saved.leaves and misfits.compare(
                path, saved.leaves[path].words(), described(path, value).words()
            ):
                fitting.add(path)
        ordered = misfits.order(saved.about["order"], self._order)
        misfits.tell(step, partial, jax.process_index() == 0)
        if ordered and self._order is not None:
            self._order.load(saved.about["order"])
        made = [_placed(saved, path, value) if path in fitting else value for path, value in ours.items()]
        _load_chance([base64.b64decode(index["random"]) for index in saved.indices])
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(state), made), step

    def step(self, n: int, state: Any, /, **metrics: Any) -> bool:
        """Step `n` is done: takes a snapshot where one is due. True: it was taken since one of the group has to
        go. Go on: Paceline ends the task once the snapshot is committed.

        A snapshot that is due while the last one is still being written is skipped, and taken after the next step.
        """
        going = leaving(n)
        if not in_a_run():
            return going
        if not self._prepared and self._every is not None:
            self._prepared = True
            self._host.prepare(held(state))
        due = self._every is not None and n % self._every == 0
        if going:
            self._save(n, state, metrics, urgent=True)
        elif due or self._late is not None:
            if _all_are(not self._background.busy()):
                self._take(n, state, metrics)
            else:
                self.skipped += due
                self._late = (n, state, metrics)
        return going

    def save(self, n: int, state: Any, /, **metrics: Any) -> None:
        """Take one now; where the last one is still being written, once it is."""
        self._save(n, state, metrics, urgent=False)

    def _save(self, n: int, state: Any, metrics: dict[str, Any], urgent: bool) -> None:
        if in_a_run():
            self._background.settle()
            self._take(n, state, metrics, urgent)

    def close(self) -> None:
        """Waits until all is written, with the last one that was due; raises where that failed."""
        if self._late is not None:
            n, state, metrics = self._late
            self.save(n, state, **metrics)
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

    def _take(self, n: int, state: Any, metrics: dict[str, Any], urgent: bool = False) -> None:
        self._late = None
        numbers = {name: float(value) for name, value in metrics.items()}
        leaves = held(state)
        self._host.hold(leaves)
        process, processes = jax.process_index(), jax.process_count()
        order = None if self._order is None else self._order.state()
        about = {"step": n, "order": order, "random": base64.b64encode(chance.state()).decode()}
        versions = {"python": platform.python_version(), "jax": jax.__version__}

        def write() -> None:
            with writing(n, processes, numbers, versions) as folder:
                files.write(folder, leaves, about, process, processes)

        self._background.start(n, write, urgent)


def _placed(saved: files.Saved, path: str, like: Any) -> Any:
    leaf = saved.leaves[path]
    if leaf.kind == "plain":
        return leaf.value
    if leaf.kind == "key":
        data = like if isinstance(like, jax.ShapeDtypeStruct) else jax.random.key_data(like)
        return jax.random.wrap_key_data(_array(saved, path, data), impl=leaf.value)
    return _array(saved, path, like)


def _array(saved: files.Saved, path: str, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return saved.whole(path)
    if isinstance(like, np.generic):
        return saved.whole(path)[()]
    if like.sharding is None or not getattr(like, "committed", True):  # JAX may move it to where it is needed
        return jax.numpy.asarray(saved.whole(path))
    return jax.make_array_from_callback(saved.shape(path), like.sharding, lambda index: saved.region(path, index))


def _all_are(ready: bool) -> bool:
    """In all processes the same."""
    if jax.process_count() == 1:
        return ready
    return bool(multihost_utils.process_allgather(np.array(ready)).all())


def _load_chance(saved: list[bytes]) -> None:
    """Each process its own. In a group of another size: new ones, made of the saved ones."""
    process, processes = jax.process_index(), jax.process_count()
    if len(saved) == processes:
        chance.load(saved[process])
    else:
        chance.seed(chance.derived(b"".join(saved), process, processes))


def __getattr__(name: str) -> Any:
    """Loaded when they are used: training does not need them."""
    if name in ("export", "load"):
        from paceline.jax import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
