"""Writes a curve for TensorBoard, saves snapshots, and kills itself at every 16th step, once per step."""

import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import paceline
from paceline.runtime import snapshot_folders

LAST = 60


def writer(kind: str, folder: Path) -> Any:
    """A function that writes a value for a step and tag."""
    if kind == "torch":
        sys.modules["tensorboard.compat.notf"] = types.ModuleType(
            "notf"
        )  # otherwise it imports TensorFlow, if installed
        from torch.utils.tensorboard import SummaryWriter

        summary_writer = SummaryWriter(str(folder))
        return lambda step, tag: (summary_writer.add_scalar(tag, float(step), step), summary_writer.flush())
    import tensorflow as tf

    file_writer = tf.summary.create_file_writer(str(folder))

    def write(step: int, tag: str) -> None:
        with file_writer.as_default(step):
            tf.summary.scalar(tag, float(step))
        file_writer.flush()

    return write


def main(kind: str, state: Path, saves: bool) -> None:
    folder = Path(os.environ["PACELINE_TENSORBOARD_DIR"])
    if os.environ["PACELINE_ROLE"] == "evaluator":
        write = writer(kind, folder / "eval")
        for step in range(1000, 1020):  # it has its own step numbers
            write(step, "accuracy")
        while not (state / "finish").exists():
            time.sleep(0.02)
        write(1020, "accuracy")
        return
    write = writer(kind, folder / "train")
    restored = snapshot_folders.restored()
    step = int((restored / "step").read_text()) if restored else 0
    while step < LAST:
        step += 1
        write(step, "loss")
        if step % 20 == 0:
            write(step // 20, "epoch")
        if saves and step % 10 == 0:
            with snapshot_folders.writing(step) as target:
                (target / "step").write_text(str(step))
        paceline.report(step=step)
        while step == 16 and "--shown" in sys.argv and not (state / "seen").exists():
            time.sleep(0.02)  # until the test has seen it
        if step % 16 == 0 and not (state / str(step)).exists():
            (state / str(step)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    while "--shown" in sys.argv and not (state / "finish").exists():
        time.sleep(0.02)
    (state / "finish").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--saves" in sys.argv)
