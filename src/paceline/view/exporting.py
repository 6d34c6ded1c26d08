"""Runs a job's export, and puts the model into place once it is whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.runtime.exporting import CannotExport, complete
from paceline.storage.manifest import Id
from paceline.view.programs import EXPORT_DIR, Program
from paceline.view.snapshots import made_for

PATIENCE_S = 10.0  # for a program that was told to end


class NotExported(Exception):
    """The export has failed, and left nothing; the message says why."""


def check(to: Path) -> None:
    """Before anything is fetched for it."""
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise NotExported(f"{to} is there already, and not an empty folder")


def export(program: Program, restored: Path, run: str, id: Id, to: Path) -> dict[str, Any]:
    """The model in `to`: what paceline.json says of it. What the program prints goes to standard error."""
    check(to)
    with made_for(to.parent):
        folder = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        try:
            folder.chmod(0o777 & ~_umask())
            _run(program.given(**{EXPORT_DIR: str(folder), "PACELINE_RESTORE": str(restored)}))
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
    except BaseException:  # Ctrl-C: at a terminal it has been told, too
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except BaseException:
            process.kill()
            process.wait()
        raise
    if code:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise NotExported(f"the job's export {how}; nothing was exported")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
