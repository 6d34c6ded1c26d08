"""Snapshots of TensorFlow training: everything needed to resume, written in the background.

order = paceline.Shards(size=len(images), batch=100)
data = indices(order).map(lambda chosen: (tf.gather(images, chosen), tf.gather(labels, chosen))).prefetch(2)
with Snapshots({"model": model, "optimizer": optimizer}, every=100, order=order) as snapshots:
    step = snapshots.restore()
    while order.epoch < 5:
        for x, y in order.through(data):
            loss = train_step(x, y)
            step += 1
            snapshots.step(step, loss=loss)
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from paceline.runtime import restore_stages, snapshot_folders
from paceline.runtime.group_save import is_stopping, should_save
from paceline.runtime.report import report_last_step, report_step, warn
from paceline.runtime.save_schedule import Every, SaveSchedule
from paceline.runtime.shards import Shards
from paceline.runtime.snapshot_mismatches import Mismatches, SnapshotMismatch, SnapshotRefused
from paceline.tensorflow import randomness, state
from paceline.tensorflow.group import Group
from paceline.tensorflow.state import STATE, Copy, State

if TYPE_CHECKING:
    from paceline.tensorflow.exporting import export

__all__ = ["SnapshotMismatch", "SnapshotRefused", "Snapshots", "export", "indices", "settings"]

_READY, _BUSY, _NOT_IN_A_RUN = 1, 2, 3


def indices(order: Shards) -> tf.data.Dataset:
    """A dataset of this task's indices for each remaining step of the epoch; iterate it again for the next epoch.

    Reading ahead does not move the position of `order`, as long as training gets its batches through
    `order.through(dataset)`. Do not use `repeat`, `shuffle` or `cache`: `order` itself determines the order. Autotuning
    is off: set how far `prefetch` reads ahead, and how many calls `map` makes in parallel.

    Under MultiWorkerMirroredStrategy: `strategy.distribute_datasets_from_function(lambda _: dataset)`, one replica per
    task.
    """
    options = tf.data.Options()
    # TensorFlow's autotuning thread may miss the end of a pipeline; training, which waits for it, then stalls for
    # up to a minute at the end of an epoch.
    options.autotune.enabled = False
    data = tf.data.Dataset.from_generator(order.ahead, output_signature=tf.TensorSpec([None], tf.int64))
    return data.with_options(options)


def settings() -> Any:
    """The `settings` that the program which took the snapshot passed to `Snapshots`: use them to rebuild the model
    without repeating its sizes. None if there is no snapshot, or it has no settings."""
    folder = snapshot_folders.restored()
    return None if folder is None else state.read_metadata(folder)["settings"]


class Snapshots:
    """Takes snapshots of a `tf.train.Checkpoint`, or of a dict of trackable objects, and restores them.

    A snapshot contains the variables, the seeds of Keras' layers, the step, the position of `order`, and random state:
    that of `random` and of `numpy.random`, the global generator of TensorFlow, and the seeds that ops outside of a
    `tf.function` get after `tf.random.set_seed`. Each worker gets its own random state back; a worker that did not
    exist when the snapshot was taken starts with that of its program.

    Not restored: the position of an op such as `tf.random.normal` inside a `tf.function`, or with its own `seed`, and
    generators that are not in the checkpoint. Use `tf.random.Generator` and put it into the checkpoint, or
    `tf.random.stateless_*` with the step as seed, or Keras' layers: these resume bit for bit.

    Variables with separate values per replica are restored correctly under all strategies. With
    MultiWorkerMirroredStrategy every worker makes the same calls at the same steps and the first one writes; with
    ParameterServerStrategy only the coordinator makes them, after `ClusterCoordinator.join`, and has all values in its
    memory while it writes them.

    Plain TensorFlow can read them: `tf.train.Checkpoint(model=model, optimizer=optimizer).read(f"{folder}/ckpt")`.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint | Mapping[str, Any],
        every: Every = None,
        order: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`every`: steps between snapshots, or a duration such as "30s"; None: only on request, or when a task is about
        to be stopped. `order`: an object with `state` and `load`, such as `paceline.Shards`. `settings`: the values
        needed to build the model, as JSON: sizes, vocabularies. They are stored in the snapshot, `settings()` returns
        them to a program that tries or exports the model, and a snapshot with other settings does not fit."""
        if not isinstance(checkpoint, tf.train.Checkpoint):
            checkpoint = tf.train.Checkpoint(**checkpoint)
        self.checkpoint = checkpoint
        self._schedule = SaveSchedule(every)
        self.order = order
        self.settings = None if settings is None else json.loads(json.dumps(settings))  # as restored from a snapshot
        self.skipped = 0  # snapshots that were not taken when due, because the last one was still being written
        self._background = snapshot_folders.Background()
        self._state = State(checkpoint)
        self._cached_group: Group | None = None
        self._step = 0
        self.due = False  # whether the next step takes a snapshot; callers may set it
        self._postponed = False
        self._program_rates: dict[str, float] = {}  # learning rates as the program set them
        self._restored = False  # the Keras callback may restore twice
        self._prepared = False  # whether values were copied once
        self._metrics: dict[str, Any] = {}

    @restore_stages.reported
    def restore(self, partial: bool = False) -> int:
        """Restore the snapshot of this run; return the number of completed steps, or 0 if there is no snapshot.

        All variables must exist: call `model.build(...)` and `optimizer.build(model.trainable_variables)` before. If
        the snapshot does not fit, SnapshotMismatch lists the names, and nothing is changed. `partial`: restore the
        variables that fit; everything else stays unchanged, and a warning lists it.

        A warning lists learning rates that differ between this program and the one that took the snapshot. The
        snapshot's rate is used, except in a run that starts from another run (`snapshots.from`): there, the program's
        is. Settings that are not variables, such as all others of Keras' optimizers, always come from the program.
        """
        if not self._restored:
            rates = self._state.learning_rates()
            self._program_rates = {name: float(tf.convert_to_tensor(rate)) for name, rate in rates.items()}
        folder = snapshot_folders.restored()
        if folder is None:
            return 0
        metadata = state.read_metadata(folder)
        mismatches = Mismatches()
        fitting = self._state.compare(folder, mismatches)
        order_fits = mismatches.order(metadata["order"], self.order)
        if self.settings is not None:
            mismatches.settings(metadata["settings"], self.settings)
        group = self._group()
        warns = group.chief and not self._restored
        mismatches.raise_or_warn(
            int(metadata["step"]), partial, warns, " (before restoring, build model and optimizer)"
        )
        self._state.restore(folder, fitting, partial=bool(mismatches))
        self._apply_learning_rates(metadata["rates"], fitting, warns)
        if order_fits:
            self.order.load(metadata["order"])
        if group.rank < len(metadata["random"]):
            randomness.load(metadata["random"][group.rank])
        self._step, self.due, self._restored = int(metadata["step"]), False, True
        return self._step

    def _apply_learning_rates(self, theirs: dict[str, float], fitting: set[str], warns: bool) -> None:
        use_program_rates, differences = snapshot_folders.from_another_run(), []
        for name, rate in self._state.learning_rates().items():
            ours = self._program_rates.get(name)
            if name in fitting and name in theirs and ours is not None and theirs[name] != ours:
                differences.append(f"{name} ({theirs[name]} in the snapshot, {ours} here)")
                if use_program_rates:
                    rate.assign(ours)
                else:
                    self._program_rates[name] = theirs[name]
        if differences and warns:
            owner = "program" if use_program_rates else "snapshot"
            warn(f"settings differ; using those of the {owner}: {', '.join(differences)}")

    def step(self, n: int, /, **metrics: Any) -> bool:
        """Report that step `n` is complete, and take a snapshot if one is due. Call it after every step, in every
        worker. Returns True if the snapshot was taken because a task of the group is about to be stopped. Keep
        training: Paceline ends the task once the snapshot is committed.

        A snapshot that is due while the last one is still being written is postponed to a later step.
        """
        report_step(n, metrics)
        is_requested = should_save(n)
        stopping = is_requested and is_stopping()
        is_time = self._schedule.check_time()
        due_now = is_requested or is_time or self._schedule.is_due(n, self._step)
        self._step, self._metrics = n, metrics
        self.due = self.due or due_now
        began = time.monotonic()
        if stopping:
            self._wait_for_last()
            self._take(self._group().chief_value(self._status()), began, urgent=True)
        elif self.due:
            status = self._group().chief_value(self._status())
            if status == _BUSY:
                self.skipped += due_now or not self._postponed
                self._postponed = True
            else:
                self._wait_for_last()
                self._take(status, began)
        elif not self._prepared:
            self._prepare()
        return stopping

    def save(self, n: int, /, **metrics: Any) -> None:
        """Take a snapshot now, once the last one is written. Training continues as soon as the values are copied."""
        self._step, self._metrics = n, metrics
        began = time.monotonic()
        self._wait_for_last()
        self._take(self._group().chief_value(self._status()), began)

    def close(self) -> None:
        """Take a postponed snapshot, if any, and wait until everything is written; raises if that failed."""
        report_last_step()
        if self.due:
            self.save(self._step, **self._metrics)
        self._background.wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._wait_for_last()  # other workers may be in the middle of a step: do nothing that needs them

    def _wait_for_last(self) -> None:
        """A failed write was already reported, and training continues; but not with a state that cannot be restored."""
        try:
            self._background.wait()
        except SnapshotMismatch:
            raise
        except Exception:
            pass

    def _group(self) -> Group:
        if self._cached_group is None:
            self._cached_group = Group(self._state.strategy)
        return self._cached_group

    def _status(self) -> int:
        if not snapshot_folders.in_a_run():
            return _NOT_IN_A_RUN
        return _BUSY if self._background.busy() else _READY

    def _prepare(self) -> None:
        """The first copy takes far longer than later ones: after the first step, neither a restart nor a snapshot waits
        for it."""
        self._prepared = True
        if self._copies_values():
            self._state.copy().drop()

    def _copies_values(self) -> bool:
        """Whether this process is the one that writes, or one of those that gather values with it."""
        return self._group().chief or self._group().collective

    def _take(self, status: int, began: float, urgent: bool = False) -> None:
        """`began`: since when training waits for it."""
        self.due = self._postponed = False
        self._schedule.taken()
        if status == _NOT_IN_A_RUN or not self._copies_values():
            return
        self._prepared = True
        group = self._group()
        random = group.gather(randomness.state())
        copy = self._state.copy()
        if group.chief:
            step, metrics = self._step, {name: float(value) for name, value in self._metrics.items()}
            position = None if self.order is None else self.order.state()
            metadata = {
                "step": step,
                "order": position,
                "random": random,
                "rates": self._program_rates,
                "settings": self.settings,
            }
            stall = time.monotonic() - began
            self._background.start(step, lambda: self._write(step, copy, metadata, metrics, stall), urgent)

    def _write(self, step: int, copy: Copy, metadata: dict[str, Any], metrics: dict[str, float], stall: float) -> None:
        """Runs in the background."""
        versions = {"python": platform.python_version(), "tensorflow": tf.__version__, "numpy": np.__version__}
        for name in ("keras", "tf_keras"):
            if name in sys.modules:
                versions[name] = sys.modules[name].__version__

        def write(folder: Path) -> None:
            copy.write(folder)  # first, since it releases the GIL
            (folder / STATE).write_text(json.dumps(metadata))
            self._state.verify()

        try:
            snapshot_folders.save_snapshot(write, step, metrics=metrics, versions=versions, stall=stall)
        finally:
            copy.drop()  # an exception would keep the values in memory


def __getattr__(name: str) -> Any:
    """Imported on first use: training does not need it."""
    if name == "export":
        from paceline.tensorflow import exporting

        return exporting.export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
