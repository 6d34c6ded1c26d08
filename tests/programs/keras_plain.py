"""Plain Keras with its own callbacks, without Paceline. After two epochs it deletes its folder and kills itself."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

FOLDER = Path("ckpt")
state = Path(sys.argv[1])  # not in the folder that is lost

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
model.compile(optimizer="adam", loss="mse")
x = np.arange(40, dtype="float32").reshape(10, 4)


class Waits(keras.callbacks.Callback):
    """Runs after the other callbacks."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        print(f"epoch {epoch} done", flush=True)
        if epoch == 1 and not (state / "lost").exists():
            (state / "waits").touch()
            while not (state / "lose").exists():
                time.sleep(0.05)
            (state / "lost").touch()
            shutil.rmtree(FOLDER)
            os.kill(os.getpid(), signal.SIGKILL)


print("model", (FOLDER / "model.keras").exists(), flush=True)
model.fit(
    x, x[:, :3], batch_size=5, epochs=4, verbose=0,
    callbacks=[
        keras.callbacks.ModelCheckpoint(FOLDER / "model.keras"),
        keras.callbacks.BackupAndRestore(FOLDER / "backup"),
        Waits(),
    ],
)  # fmt: skip
loaded = keras.saving.load_model(FOLDER / "model.keras")
assert all(np.array_equal(a, b) for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True))
print("weights", float(sum(np.abs(each).sum() for each in model.get_weights())), flush=True)
