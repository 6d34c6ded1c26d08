"""Reports steps, metrics and snapshots as a training program does, and prints a line for each step."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import paceline

HOSTILE = "<img src=x onerror=\"document.title='taken over'\"><script>document.title='taken over'</script>"

ODD_NAMES = ("<img src=x onerror=document.title=1>", "constructor", "__proto__")


def main(steps: int) -> None:
    restored = os.environ["PACELINE_RESTORE"]
    step = int(Path(restored, "step").read_text()) if restored else 0
    print(HOSTILE, flush=True)
    while step < steps:
        time.sleep(0.1)
        step += 1
        loss = 2.4 * math.exp(-step / 150) + 0.2
        paceline.report(step=step, loss=loss, accuracy=1 - loss / 3, **{name: float(step) for name in ODD_NAMES})
        print(f"step {step}: loss {loss:.4f}", flush=True)
        if step % 20 == 0:
            save(Path(os.environ["PACELINE_SNAPSHOT_DIR"]), step)


def save(folder: Path, step: int) -> None:
    (folder / "partial").mkdir()
    (folder / "partial" / "step").write_text(str(step))
    (folder / "partial").rename(folder / f"step-{step}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
