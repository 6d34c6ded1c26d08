"""`paceline init`: writes a job file for a training script; asks nothing it can find out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.say import fail, tell

if TYPE_CHECKING:
    from paceline.cli.script import Script


def main(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="The training script, or its folder; this folder where it is left out.",
                       show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a job file that is there.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", "-w", metavar="N", help="How many workers.")] = None,
) -> int:  # fmt: skip
    """Write job.yaml for a training script. The script is read, not run."""
    from paceline.job import JobError, from_command, load_text

    chosen = _choose(Path(script) if script else Path())
    target = chosen.path.parent / "job.yaml"
    if target.exists() and not force:
        fail(f"{target} is there already; --force overwrites it")
    gpus = _gpus()
    amount = workers if workers is not None else 1 if gpus else 2
    parameter_server = chosen.strategy == "parameter-server"
    text = from_command(
        framework=chosen.framework, workers=amount, strategy=chosen.strategy, ps=1 if parameter_server else 0,
        chief=chosen.chief, evaluator=chosen.evaluator, gpus=gpus or None, name=_name(chosen.path),
        command=["python", chosen.path.name], folder=chosen.path.parent,
    )  # fmt: skip
    try:
        load_text(text, str(target), chosen.path.parent, [])
    except JobError as error:
        fail(f"no valid job file comes of {chosen.path}:\n{error}")
    target.write_text(text, encoding="utf-8")
    _explain(chosen, gpus)
    shown = os.path.relpath(target)
    tell(f"wrote {shown}; look it over, then: paceline run {shown}")
    return 0


def _choose(path: Path) -> Script:
    from paceline.cli.script import Unreadable, candidates, look

    if path.is_dir():
        found = candidates(path)
        if not found:
            fail(f"there is no Python script in {path.resolve()}; name one: paceline init path/to/train.py")
        others = [script.path.name for script in found[1:] if script.framework != "none"]
        if others:
            tell(f"chose {found[0].path.name} over {', '.join(others[:5])}; name another: paceline init {others[0]}")
        return found[0]
    if not path.exists():
        fail(f"there is no {path}")
    try:
        return look(path)
    except Unreadable as error:
        fail(str(error))


def _name(path: Path) -> str:
    """The name of the folder, as far as it can begin the id of a run; else that of the script."""
    for text in (path.resolve().parent.name, path.stem, "job"):
        name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
        if name and name[0].isalpha():
            return name
    return "job"


def _gpus() -> int:
    from paceline.view.machine import gpus

    return len(gpus() or [])


def _explain(script: Script, gpus: int) -> None:
    what = " ".join(filter(None, [script.framework, script.strategy]))
    tell(f"{script.path.name}: {what}, since {' and '.join(script.reasons)}")
    if gpus:
        tell(f"this machine has {gpus} GPU{'s' if gpus > 1 else ''}: one host that uses all of them")
    if not script.distributed and script.framework != "none":
        tell("note: nothing in it makes workers train together: each would train alone, on all the data")
