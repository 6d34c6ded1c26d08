"""Makes callbacks of Keras 3 work on several workers: only the first worker keeps files, and all resume from them."""

import os
import tempfile
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch(fit: "Any") -> None:
    """`fit`: the globals of keras_fit.py."""
    import tensorflow as tf
    from keras.src import callbacks
    from keras.src.callbacks.callback_list import CallbackList

    is_multi_worker, replace = fit.is_multi_worker, fit.replace
    finished: set[str] = set()  # backup folders of fits that have ended

    def is_first_worker(callback: "Any") -> bool:
        return bool(fit.is_first_worker(callback.model.distribute_strategy))

    def checkpoint(original: "Any") -> "Any":
        def _get_file_path(self: "Any", epoch: int, batch: "Any", logs: "Any") -> "Any":
            """Every worker saves, since saving may need all of them, but only the first worker keeps the file."""
            path = original(self, epoch, batch, logs)
            if is_first_worker(self):
                return path
            self._paceline = tempfile.TemporaryDirectory(prefix="paceline-")
            return f"{self._paceline.name}/model{''.join(Path(path).suffixes[-2:])}"

        return _get_file_path

    def backup(original: "Any") -> "Any":
        def _save_model(self: "Any") -> None:
            if is_first_worker(self):
                original(self)
                return
            with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                self.model.save_weights(f"{folder}/latest.weights.h5", overwrite=True)

        return _save_model

    def load(original: "Any") -> "Any":
        def _load_model(self: "Any") -> None:
            """Other workers do not delete the folder at the end, so `finished` prevents them from loading it again."""
            if is_first_worker(self) or self.backup_dir not in finished:
                original(self)

        return _load_model

    def end(original: "Any") -> "Any":
        def on_train_end(self: "Any", logs: "Any" = None) -> None:
            if is_first_worker(self):
                original(self, logs)
            elif self.delete_checkpoint:
                finished.add(self.backup_dir)

        return on_train_end

    def log(original: "Any") -> "Any":
        def on_train_begin(self: "Any", logs: "Any" = None) -> None:
            if not is_first_worker(self):
                self.filename = os.devnull
            original(self, logs)

        return on_train_begin

    def board(original: "Any") -> "Any":
        def set_model(self: "Any", model: "Any") -> None:
            if not fit.is_first_worker(model.distribute_strategy):
                self._paceline = tempfile.TemporaryDirectory(prefix="paceline-")
                self.log_dir = self._paceline.name
            original(self, model)

        return set_model

    def begin(original: "Any") -> "Any":
        def on_train_begin(self: "Any", logs: "Any" = None) -> None:
            """If BackupAndRestore has restored only some workers, all continue from the state of the first worker."""
            original(self, logs)
            model = self._model
            strategy = model.distribute_strategy if model is not None else tf.distribute.get_strategy()
            if model is None or not is_multi_worker(strategy):
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
            fit.ShuffleOrder.epoch = epoch
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
