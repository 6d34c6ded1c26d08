"""`paceline init`: writes a job file for a training script, without questions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import fail, note, tell

if TYPE_CHECKING:
    from paceline.job.script_inspection import Script


def main(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="Training script or its folder (default: this folder).",
                       show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing job file.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", "-w", metavar="N", help="Number of worker hosts.")] = None,
) -> int:  # fmt: skip
    """Write job.yaml for a training script.

    The script is read, not run.
    """
    from paceline.job import JobError, load_text
    from paceline.job.new_job_file import job_text

    inspected = _choose(Path(script) if script else Path())
    target = inspected.path.parent / "job.yaml"
    if target.exists() and not force:
        fail(f"{target} already exists", remedy="--force overwrites it")
    gpus = _gpus()
    worker_count = workers if workers is not None else 1 if gpus else 2
    parameter_server = inspected.strategy == "parameter-server"
    text = job_text(
        framework=inspected.framework, workers=worker_count, strategy=inspected.strategy,
        ps=1 if parameter_server else 0, chief=inspected.chief, evaluator=inspected.evaluator, gpus=gpus or None,
        name=_name(inspected.path), command=["python", inspected.path.name], folder=inspected.path.parent,
    )  # fmt: skip
    try:
        load_text(text, str(target), inspected.path.parent, [])
    except JobError as error:
        fail(f"cannot write a valid job file for {inspected.path}:\n{error}")
    target.write_text(text, encoding="utf-8")
    _explain(inspected, gpus)
    relative_path = os.path.relpath(target)
    tell(f"wrote {relative_path}; review it, then: paceline run {relative_path}")
    return 0


def _choose(path: Path) -> Script:
    from paceline.job.script_inspection import UnreadableScript, candidates, inspect_script

    if path.is_dir():
        scripts = candidates(path)
        if not scripts:
            fail(f"no Python script in {path.resolve()}", remedy="name one: paceline init path/to/train.py")
        others = [script.path.name for script in scripts[1:] if script.framework != "none"]
        if others:
            chosen, rejected = scripts[0].path.name, ", ".join(others[:5])
            tell(f"chose {chosen} over {rejected}; to use another: paceline init {others[0]}")
        return scripts[0]
    if not path.exists():
        fail(f"{path} does not exist")
    try:
        return inspect_script(path)
    except UnreadableScript as error:
        fail(str(error))


def _name(path: Path) -> str:
    """The folder's name in the form of a job name; if that is not possible, the script's."""
    for text in (path.resolve().parent.name, path.stem, "job"):
        name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
        if name and name[0].isalpha():
            return name
    return "job"


def _gpus() -> int:
    from paceline.view.machine_info import gpus

    return len(gpus() or [])


def _explain(script: Script, gpus: int) -> None:
    setup = " ".join(filter(None, [script.framework, script.strategy]))
    tell(f"{script.path.name}: {setup}, because {' and '.join(script.reasons)}")
    if gpus:
        tell(f"this machine has {gpus} GPU{'s' if gpus > 1 else ''}: one host uses all of them")
    if not script.distributed and script.framework != "none":
        note("the script does not synchronize its workers: each one would train alone on all the data")
