"""Writes a curve for TensorBoard, saves snapshots, and kills itself where it is told to: each place once."""

import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import paceline
from paceline.runtime import contract

LAST = 60


def writer(kind: str, folder: Path) -> Any:
    """A function of step and tag."""
    if kind == "torch":
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")  # or it imports TensorFlow, where that is
        from torch.utils.tensorboard import SummaryWriter

        made = SummaryWriter(str(folder))
        return lambda step, tag: (made.add_scalar(tag, float(step), step), made.flush())
    import tensorflow as tf

    opened = tf.summary.create_file_writer(str(folder))

    def write(step: int, tag: str) -> None:
        with opened.as_default(step):
            tf.summary.scalar(tag, float(step))
        opened.flush()

    return write


def main(kind: str, state: Path, saves: bool) -> None:
    folder = Path(os.environ["PACELINE_TENSORBOARD_DIR"])
    if os.environ["PACELINE_ROLE"] == "evaluator":
        write = writer(kind, folder / "eval")
        for step in range(1000, 1020):  # it counts on its own
            write(step, "accuracy")
        while not (state / "finish").exists():
            time.sleep(0.02)
        write(1020, "accuracy")
        return
    write = writer(kind, folder / "train")
    restored = contract.restored()
    step = int((restored / "step").read_text()) if restored else 0
    while step < LAST:
        step += 1
        write(step, "loss")
        if step % 20 == 0:
            write(step // 20, "epoch")
        if saves and step % 10 == 0:
            with contract.writing(step) as to:
                (to / "step").write_text(str(step))
        paceline.report(step=step)
        while step == 16 and "--shown" in sys.argv and not (state / "seen").exists():
            time.sleep(0.02)  # until somebody has seen it
        if step % 16 == 0 and not (state / str(step)).exists():
            (state / str(step)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    while "--shown" in sys.argv and not (state / "finish").exists():
        time.sleep(0.02)
    (state / "finish").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--saves" in sys.argv)
