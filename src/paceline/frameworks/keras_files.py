"""Callbacks of Keras 3 on several workers: the first worker's files count, and all go on as it does."""

import os
import tempfile
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch(fit: "Any") -> None:
    """`fit`: what keras_fit.py has."""
    import tensorflow as tf
    from keras.src import callbacks
    from keras.src.callbacks.callback_list import CallbackList

    several, replace = fit.several, fit.replace
    ended: set[str] = set()  # folders of which a fit came to its end

    def first(callback: "Any") -> bool:
        return bool(fit.first(callback.model.distribute_strategy))

    def checkpoint(original: "Any") -> "Any":
        def _get_file_path(self: "Any", epoch: int, batch: "Any", logs: "Any") -> "Any":
            """Every worker saves, since that may need the others; of all but the first, nothing is kept."""
            path = original(self, epoch, batch, logs)
            if first(self):
                return path
            self._paceline = tempfile.TemporaryDirectory(prefix="paceline-")
            return f"{self._paceline.name}/model{''.join(Path(path).suffixes[-2:])}"

        return _get_file_path

    def backup(original: "Any") -> "Any":
        def _save_model(self: "Any") -> None:
            if first(self):
                original(self)
                return
            with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                self.model.save_weights(f"{folder}/latest.weights.h5", overwrite=True)

        return _save_model

    def load(original: "Any") -> "Any":
        def _load_model(self: "Any") -> None:
            """A worker that is not the first leaves the folder alone, and so its end is remembered here."""
            if first(self) or self.backup_dir not in ended:
                original(self)

        return _load_model

    def end(original: "Any") -> "Any":
        def on_train_end(self: "Any", logs: "Any" = None) -> None:
            if first(self):
                original(self, logs)
            elif self.delete_checkpoint:
                ended.add(self.backup_dir)

        return on_train_end

    def log(original: "Any") -> "Any":
        def on_train_begin(self: "Any", logs: "Any" = None) -> None:
            if not first(self):
                self.filename = os.devnull
            original(self, logs)

        return on_train_begin

    def board(original: "Any") -> "Any":
        def set_model(self: "Any", model: "Any") -> None:
            if not fit.first(model.distribute_strategy):
                self._paceline = tempfile.TemporaryDirectory(prefix="paceline-")
                self.log_dir = self._paceline.name
            original(self, model)

        return set_model

    def begin(original: "Any") -> "Any":
        def on_train_begin(self: "Any", logs: "Any" = None) -> None:
            """Where BackupAndRestore has found something on some workers only, all go on as the first one does."""
            original(self, logs)
            model = self._model
            strategy = model.distribute_strategy if model is not None else tf.distribute.get_strategy()
            if model is None or not several(strategy):
                return
            epoch = -1 if model._initial_epoch is None else model._initial_epoch
            epochs = strategy.gather(tf.constant([epoch]), axis=0).numpy()
            if len(set(epochs)) == 1:
                return
            for variable in [*model.variables, *model.optimizer.variables]:
                variable.assign(strategy.gather(tf.convert_to_tensor(variable)[None], axis=0)[0])
            model._initial_epoch = None if epochs[0] < 0 else int(epochs[0])

        return on_train_begin

    def epoch(original: "Any") -> "Any":
        def on_epoch_begin(self: "Any", epoch: int, logs: "Any" = None) -> None:
            fit.Order.epoch = epoch
            original(self, epoch, logs)

        return on_epoch_begin

    replace(callbacks.ModelCheckpoint, "_get_file_path", checkpoint)
    replace(callbacks.BackupAndRestore, "_save_model", backup)
    replace(callbacks.BackupAndRestore, "_load_model", load)
    replace(callbacks.BackupAndRestore, "on_train_end", end)
    replace(callbacks.CSVLogger, "on_train_begin", log)
    replace(callbacks.TensorBoard, "set_model", board)
    replace(CallbackList, "on_train_begin", begin)
    replace(CallbackList, "on_epoch_begin", epoch)
