"""`paceline export`: a model from a snapshot of a run, by the job's own program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption
from paceline.cli.reading import CodeOption, JobOption, SnapshotOption, Where, ended_like_ctrl_c, restored
from paceline.cli.say import fail, tell


def main(
    run: Where = None,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="A folder that is new, or empty.")] = "",
    snapshot: SnapshotOption = None,
    job: JobOption = "",
    code: CodeOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Export a model from a snapshot of the run, by the job's `export.command`, on this machine.

    \b
    paceline export translate-3f9a --to model
    paceline export s3://bucket/path/translate-3f9a --snapshot best --to model --job job.yaml

    DIR is there only once the model is whole; paceline.json in it says what the model takes and gives.
    """
    if not to:
        fail("say where to: --to DIR")
    from paceline.view import exporting, programs

    folder = Path(to).expanduser().absolute()
    exporting.check(folder)
    with (
        restored(run, snapshot, on, context, namespace, lambda source: programs.find(source, "export", job, code)) as (
            program,
            held,
            made,
        ),
        ended_like_ctrl_c(),
    ):
        about = exporting.export(program, held.folder, made.run, made.id, folder)
    tell(f"{made.id} of {made.run} is exported to {folder}: {_words(about)}")
    return 0


def _words(about: dict[str, object]) -> str:
    signatures = about["signatures"]
    names = ", ".join(signatures) if isinstance(signatures, dict) else ""
    return f"{about['format']}, {names}" if names else str(about["format"])
