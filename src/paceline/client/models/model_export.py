"""Runs a job's export command, and moves the model to its folder when it is complete."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.client.models.job_programs import EXPORT_DIR, Program
from paceline.errors import PacelineError
from paceline.runtime.model_folder import CannotExport, complete
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.view.snapshots.snapshot_listing import created_folder

PATIENCE_S = 10.0  # seconds for the program to end after SIGTERM


class NotExported(PacelineError):
    """The export failed and left nothing behind."""


def check(to: Path) -> None:
    """Raises NotExported if `to` cannot be used; called before a snapshot is fetched."""
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise NotExported(f"{to} already exists and is not an empty folder")


def export(program: Program, restored: Path, run: str, id: SnapshotId, to: Path) -> dict[str, Any]:
    """Exports the model to `to` and returns its paceline.json. The program's output goes to standard error."""
    check(to)
    with created_folder(to.parent):
        folder = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        try:
            folder.chmod(0o777 & ~_umask())
            _run(program.extended(**{EXPORT_DIR: str(folder), "PACELINE_RESTORE": str(restored)}))
            about = complete(folder, run, id.step)
            folder.rename(to)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, CannotExport):
                raise NotExported(str(error)) from None
            raise
    return about


def _run(program: Program) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    process = subprocess.Popen(program.argv, cwd=program.folder, env=dict(program.env), stdout=2)
    try:
        code = process.wait()
    except BaseException:  # Ctrl-C: on a terminal the program receives it, too
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except BaseException:
            process.kill()
            process.wait()
        raise
    if code:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise NotExported(f"the job's export.command {how}; nothing was exported")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
