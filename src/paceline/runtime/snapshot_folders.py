"""The snapshot contract: a folder to write to, and a folder to resume from. Needs no framework.

save_snapshot(lambda folder: torch.save(state, folder / "state.pt"), step, metrics={"loss": 0.5})  # see in_a_run()
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable

from paceline.runtime import report

_NICE = 10  # the thread gets about a tenth of a core if others compete for it
_RESERVE = 1024 * 1024  # bytes of memory that a snapshot leaves free, for what the agent writes next to it
_NO_ROOM = "no-room"  # a file that tells the agent why a snapshot is on disk
ABOUT = (
    "paceline.json"  # next to the files of a snapshot: number of parts, metrics, versions, and how long training waited
)


def in_a_run() -> bool:
    return bool(os.environ.get("PACELINE_SNAPSHOT_DIR"))


def restored() -> Path | None:
    """The folder to resume from, whose files must not be changed in place. None: start from scratch. The captain has
    chosen it (agent/captain/snapshots/restore_preparation.py)."""
    folder = os.environ.get("PACELINE_RESTORE")
    return Path(folder) if folder else None


def from_another_run() -> bool:
    """Whether the restored snapshot is the one the run starts from (`snapshots.from`), which is of generation 0."""
    folder = restored()
    return folder is not None and folder.name.endswith("-g0")


def save_snapshot(
    write: Callable[[Path], object],
    step: int,
    parts: int = 1,
    metrics: Mapping[str, float] | None = None,
    versions: Mapping[str, str] | None = None,
    stall: float | None = None,
) -> None:
    """Save the snapshot of that step: `write` writes its files to a folder. With `snapshots.memory`, that folder is in
    memory if there is room; if `write` fails there, it is called again, for a folder on disk.

    `parts`: how many tasks write a part of this snapshot. Files that two tasks write must be identical.
    `stall`: seconds for which training waited; None: as long as this call takes, or not at all in a thread of its own.
    """
    global _last_size
    memory = os.environ.get("PACELINE_SNAPSHOT_MEMORY_DIR")
    if memory:
        with suppress(Exception):  # frameworks raise errors of their own if there is no space left
            _check_room(memory, _last_size)
            with writing(step, parts, metrics, versions, memory, stall) as folder:
                write(folder)
                _last_size = _size(folder)
                _check_room(memory)
            return
    with writing(step, parts, metrics, versions, stall=stall) as folder:
        write(folder)
        if memory:
            _last_size = _size(folder)
            (folder.parent / _NO_ROOM).touch()


_last_size = 0  # bytes of the last snapshot that this process has written


def _size(folder: Path) -> int:
    """Bytes that the files need in memory, where each has at least one page."""
    return sum(path.stat().st_size + mmap.PAGESIZE for path in folder.rglob("*"))


def _check_room(memory: str, needed: int = 0) -> None:
    if free_space(memory) < needed + _RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), memory)


def free_space(folder: str) -> int:
    """Bytes."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextmanager
def writing(
    step: int,
    parts: int = 1,
    metrics: Mapping[str, float] | None = None,
    versions: Mapping[str, str] | None = None,
    to: str | None = None,
    stall: float | None = None,
) -> Iterator[Path]:
    """A folder to write the snapshot of that step to. It is saved when the block ends without an error. `save_snapshot`
    also uses memory. `to`: instead of the task's folder on disk. `stall`: as for `save_snapshot`."""
    began = time.monotonic()
    folder = Path(to or os.environ["PACELINE_SNAPSHOT_DIR"])
    partial = folder / f"step-{step}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if stall is None:
            is_alone = threading.current_thread() is not threading.main_thread()
            stall = 0.0 if is_alone else time.monotonic() - began
        about: dict[str, Any] = {"parts": parts, "metrics": dict(metrics or {}), "versions": dict(versions or {})}
        about["stall_s"] = round(stall, 4)
        (partial / ABOUT).write_text(json.dumps(about))
        target, replaced = folder / f"step-{step}", folder / f"step-{step}.{os.getpid()}.before.partial"
        with suppress(FileNotFoundError):  # the same step again, and the agent has not collected the first one
            os.rename(target, replaced)  # so that the agent does not collect it while it is being deleted
        os.rename(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report.send_to_agent({"_": "saved"})


class Background:
    """Writes snapshots in a thread, one at a time, so that training does not wait."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None  # error of the last write

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, write: Callable[[], Any], urgent: bool = False) -> None:
        """Must not be called while busy. Errors become warnings: training continues, and later snapshots may succeed.
        Unless `urgent`, training has priority if both need a core."""
        if self.busy():
            raise RuntimeError("a snapshot is still being written")

        def work() -> None:
            self.failed = None
            if not urgent:
                _lower_priority()
            try:
                write()
            except Exception as error:  # any error of the framework or the disk
                self.failed = error
                text = f"the snapshot of step {step} could not be written: {error}"
                report.send_to_agent({"_": "warning", "text": text})

        self._thread = threading.Thread(target=work, name="paceline-snapshot")  # no daemon: the process waits for it
        self._thread.start()

    def wait(self) -> None:
        """Waits until the snapshot is written; raises the error if that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def settle(self) -> None:
        """Waits without raising: a failure has already been reported."""
        try:
            self.wait()
        except Exception:
            return


def _lower_priority() -> None:
    """Lowers the priority of the calling thread."""
    if sys.platform == "linux":  # on other systems, this would change the whole process
        with suppress(OSError):  # a sandbox that forbids it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
