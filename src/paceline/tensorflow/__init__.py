"""Snapshots for TensorFlow: taken while training goes on, and everything is in them.

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
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from paceline.runtime import contract
from paceline.runtime.leaving import leaving
from paceline.runtime.misfits import Misfits, SnapshotMismatch, SnapshotRefused
from paceline.runtime.report import say
from paceline.runtime.shards import Shards
from paceline.tensorflow import randomness, state
from paceline.tensorflow.group import Group
from paceline.tensorflow.state import STATE, Copy, State

if TYPE_CHECKING:
    from paceline.tensorflow.exporting import export

__all__ = ["SnapshotMismatch", "SnapshotRefused", "Snapshots", "export", "indices", "settings"]

_TAKE, _BUSY, _NOWHERE = 1, 2, 3


def indices(order: Shards) -> tf.data.Dataset:
    """This task's indices of each step that is left in the epoch, as a dataset; iterate it again for the next epoch.

    However far it is read ahead, `order` stays where training is, as long as training gets its batches through
    `order.through(dataset)`. Not with `repeat`, `shuffle` or `cache`: the order is made by `order` itself. Nothing is
    tuned: say how far `prefetch` reads ahead, and how many calls `map` makes at once.

    Under MultiWorkerMirroredStrategy: `strategy.distribute_datasets_from_function(lambda _: dataset)`, one replica a
    task.
    """
    options = tf.data.Options()
    # TensorFlow's thread that tunes a pipeline may miss that it is over, and what waits for it, which is training, then
    # stands still for up to a minute at the end of an epoch.
    options.autotune.enabled = False
    data = tf.data.Dataset.from_generator(order.ahead, output_signature=tf.TensorSpec([None], tf.int64))
    return data.with_options(options)


def settings() -> Any:
    """What `Snapshots(settings=...)` was given by the program that took the snapshot to go on from: of this it makes
    the model again, and no size is written down twice. None where there is no snapshot, or no settings in it."""
    folder = contract.restored()
    return None if folder is None else state.kept(folder)["settings"]


class Snapshots:
    """Takes snapshots of a `tf.train.Checkpoint`, or of a dict of what one can hold, and restores them.

    A snapshot holds the variables, the seeds of Keras' layers, the step, where `order` stands, and random state: that
    of `random` and of `numpy.random`, the global generator of TensorFlow, and the seeds that ops outside of a
    `tf.function` get after `tf.random.set_seed`. Each worker has its own random state back; a worker that was not
    there when the snapshot was taken begins with that of its program.

    What cannot be had back: how far an op like `tf.random.normal` is inside a `tf.function`, or with a `seed` of its
    own, and generators that are not in the checkpoint. Use `tf.random.Generator` and put it into the checkpoint, or
    `tf.random.stateless_*` with the step as seed, or Keras' layers: these resume bit for bit.

    Variables that are shared out over replicas are right under all strategies. With MultiWorkerMirroredStrategy every
    worker makes the same calls at the same steps and the first one writes; with ParameterServerStrategy only the
    coordinator calls, after `ClusterCoordinator.join`, and has all values in its memory while it writes them.

    Plain TensorFlow reads them: `tf.train.Checkpoint(model=model, optimizer=optimizer).read(f"{folder}/ckpt")`.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint | Mapping[str, Any],
        every: int | None = None,
        order: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`every`: steps from one snapshot to the next; without it they are taken by `save`, and before leaving.
        `order`: what has `state` and `load`, as `paceline.Shards` has. `settings`: what it takes to make the model
        again, as JSON has it: sizes, vocabularies. They lie in the snapshot, `settings()` gives them to a program that
        tries or exports the model, and a snapshot with others does not fit."""
        if every is not None and every < 1:
            raise ValueError(f"every={every}: at least one step lies between snapshots")
        if not isinstance(checkpoint, tf.train.Checkpoint):
            checkpoint = tf.train.Checkpoint(**checkpoint)
        self.checkpoint = checkpoint
        self.every = every
        self.order = order
        self.settings = None if settings is None else json.loads(json.dumps(settings))  # as it is read again
        self.skipped = 0  # not taken at their step, since the last one was still being written
        self._background = contract.Background()
        self._state = State(checkpoint)
        self._made: Group | None = None
        self._at = 0
        self.due = False  # whether the next step takes a snapshot; may be set
        self._put_off = False
        self._rates: dict[str, float] = {}  # as the program gave them
        self._restored = False  # the Keras callback may do so twice
        self._metrics: dict[str, Any] = {}

    def restore(self, partial: bool = False) -> int:
        """Goes on from the snapshot of this run, where there is one: how many steps are done; else 0.

        All variables must have been made before: `model.build(...)`, `optimizer.build(model.trainable_variables)`.
        Where the snapshot does not fit, SnapshotMismatch lists the names, and nothing is changed. `partial`: the
        variables that fit are restored all the same, the rest stays as the program made it, and a warning lists it.

        A learning rate that the program gives otherwise than the one that took the snapshot is told in a warning. That
        of the snapshot counts; but where a run starts from another's (`snapshots.from`), the program's does. Settings
        that are no variables, as all others of Keras' optimizers, are always the program's.
        """
        self._state.copy().drop()  # the first time takes far longer than later ones: now, training does not wait
        if not self._restored:
            self._rates = {name: float(tf.convert_to_tensor(rate)) for name, rate in self._state.rates().items()}
        folder = contract.restored()
        if folder is None:
            return 0
        kept = state.kept(folder)
        misfits = Misfits()
        fitting = self._state.compare(folder, misfits)
        ordered = misfits.order(kept["order"], self.order)
        if self.settings is not None:
            misfits.settings(kept["settings"], self.settings)
        group = self._group()
        says = group.chief and not self._restored
        misfits.tell(int(kept["step"]), partial, says, " (before restoring, build model and optimizer)")
        self._state.restore(folder, fitting if misfits else None)
        self._settle_rates(kept["rates"], fitting, says)
        if ordered:
            self.order.load(kept["order"])
        if group.rank < len(kept["random"]):
            randomness.load(kept["random"][group.rank])
        self._at, self.due, self._restored = int(kept["step"]), False, True
        return self._at

    def _settle_rates(self, theirs: dict[str, float], fitting: set[str], says: bool) -> None:
        anew, told = contract.from_another_run(), []
        for name, rate in self._state.rates().items():
            ours = self._rates.get(name)
            if name in fitting and name in theirs and ours is not None and theirs[name] != ours:
                told.append(f"{name} ({theirs[name]} in the snapshot, {ours} here)")
                if anew:
                    rate.assign(ours)
                else:
                    self._rates[name] = theirs[name]
        if told and says:
            whose = "of the program" if anew else "in the snapshot"
            say(f"settings differ, and those {whose} count: {', '.join(told)}")

    def step(self, n: int, /, **metrics: Any) -> bool:
        """After every step, in every worker: takes a snapshot when it is time. True: it was taken since one of
        the group has to go. Go on: Paceline ends the task once the snapshot is committed.

        While the last snapshot is still being written, the next one is put off until a step finds it done.
        """
        going = leaving(n)
        now = self.every is not None and n // self.every > self._at // self.every
        self._at, self._metrics = n, metrics
        self.due = self.due or now
        if going:
            self._settle()
            self._take(self._group().chiefs(self._answer()), urgent=True)
        elif self.due:
            answer = self._group().chiefs(self._answer())
            if answer == _BUSY:
                self.skipped += now or not self._put_off
                self._put_off = True
            else:
                self._settle()
                self._take(answer)
        return going

    def save(self, n: int, /, **metrics: Any) -> None:
        """Takes a snapshot now, once the last one is written. Training goes on as soon as the values are copied."""
        self._at, self._metrics = n, metrics
        self._settle()
        self._take(self._group().chiefs(self._answer()))

    def close(self) -> None:
        """Takes the snapshot that was put off, if any, and waits until all is written; raises where that failed."""
        if self.due:
            self.save(self._at, **self._metrics)
        self._background.wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._settle()  # others may be in the middle of a step: nothing that needs them

    def _settle(self) -> None:
        """Waits for the last write. Where it failed that was told, and training goes on; but not with a wrong state."""
        try:
            self._background.wait()
        except SnapshotMismatch:
            raise
        except Exception:
            pass

    def _group(self) -> Group:
        if self._made is None:
            self._made = Group(self._state.strategy)
        return self._made

    def _answer(self) -> int:
        if not contract.in_a_run():
            return _NOWHERE
        return _BUSY if self._background.busy() else _TAKE

    def _take(self, answer: int, urgent: bool = False) -> None:
        self.due = self._put_off = False
        group = self._group()
        if answer == _NOWHERE or not (group.chief or group.together):
            return
        random = group.all(randomness.now())
        copy = self._state.copy()
        if group.chief:
            step, metrics = self._at, {name: float(value) for name, value in self._metrics.items()}
            position = None if self.order is None else self.order.state()
            rest = {"step": step, "order": position, "random": random, "rates": self._rates, "settings": self.settings}
            self._background.start(step, lambda: self._write(step, copy, rest, metrics), urgent)

    def _write(self, step: int, copy: Copy, rest: dict[str, Any], metrics: dict[str, float]) -> None:
        """In the background."""
        versions = {"python": platform.python_version(), "tensorflow": tf.__version__, "numpy": np.__version__}
        for name in ("keras", "tf_keras"):
            if name in sys.modules:
                versions[name] = sys.modules[name].__version__
        try:
            with contract.writing(step, metrics=metrics, versions=versions) as folder:
                copy.write(folder)  # first, since it lets Python go on
                (folder / STATE).write_text(json.dumps(rest))
                self._state.verify()
        finally:
            copy.drop()  # an error would keep the values in memory


def __getattr__(name: str) -> Any:
    """Loaded when they are used: training does not need them."""
    if name == "export":
        from paceline.tensorflow import exporting

        return exporting.export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
