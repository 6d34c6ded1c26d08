"""Snapshots by the contract: a folder to write to, a folder to go on from. Needs no framework and no import of ours.

with writing(step, metrics={"loss": 0.5}) as folder:  # None outside a run, or in a task that writes none
    torch.save(state, folder / "state.pt")
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable

from paceline.runtime import report

_GIVES_WAY = 10  # niceness: about a tenth of a core that others want, too
ABOUT = "paceline.json"  # beside the files of a snapshot: how many tasks write a part of it, metrics, versions


def in_a_run() -> bool:
    return bool(os.environ.get("PACELINE_SNAPSHOT_DIR"))


def restored() -> Path | None:
    """The verified folder to go on from: this task's own copy. None: begin from the start."""
    folder = os.environ.get("PACELINE_RESTORE")
    return Path(folder) if folder else None


def from_another_run() -> bool:
    """Whether that folder is what the run was told to start from (`snapshots.from`): generation 0 has no other."""
    folder = restored()
    return folder is not None and folder.name.endswith("-g0")


@contextmanager
def writing(
    step: int, parts: int = 1, metrics: Mapping[str, float] | None = None, versions: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A folder to write the snapshot of that step to; it counts once the block has ended without an error.

    `parts`: how many tasks write a part of this snapshot. Paths that two of them write must hold the same.
    """
    folder = Path(os.environ["PACELINE_SNAPSHOT_DIR"])
    partial = folder / f"step-{step}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        about = {"parts": parts, "metrics": dict(metrics or {}), "versions": dict(versions or {})}
        (partial / ABOUT).write_text(json.dumps(about))
        target, before = folder / f"step-{step}", folder / f"step-{step}.{os.getpid()}.before.partial"
        with suppress(FileNotFoundError):  # the same step once more, and the first one is not taken yet
            os.rename(target, before)  # so that nobody takes it while it is being deleted
        os.rename(partial, target)
        shutil.rmtree(before, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report.tell({"_": "saved"})


class Background:
    """One thread that writes, one snapshot at a time, so that training does not wait."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None  # the last write, where it failed

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, write: Callable[[], Any], urgent: bool = False) -> None:
        """Not while busy. What goes wrong is told as a warning: training goes on, and later snapshots may succeed.
        Unless it is urgent, training comes first where both want a core."""
        if self.busy():
            raise RuntimeError("a snapshot is still being written")

        def work() -> None:
            self.failed = None
            if not urgent:
                _give_way()
            try:
                write()
            except Exception as error:  # whatever it is, it is told
                self.failed = error
                report.tell({"_": "warning", "text": f"the snapshot of step {step} could not be written: {error}"})

        self._thread = threading.Thread(target=work, name="paceline-snapshot")  # no daemon: the process waits for it
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is written; raises where that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def settle(self) -> None:
        """The same, whether it went well or not: that has been told."""
        try:
            self.wait()
        except Exception:
            return


def _give_way() -> None:
    """For the thread that calls this."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with suppress(OSError):  # a sandbox that forbids it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _GIVES_WAY)
