"""`paceline export`: runs the job's export command to write a model from a snapshot."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption
from paceline.cli.output import expanded, fail, tell
from paceline.cli.snapshot_options import (
    CodeOption,
    JobOption,
    RunOrLocation,
    SnapshotOption,
    interrupt_on_signals,
    restored,
)


def main(
    run: RunOrLocation = None,
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="Folder to write the model to; must be new or empty. Required.")
    ] = "",
    snapshot: SnapshotOption = None,
    job: JobOption = "",
    code: CodeOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Export a model from a snapshot of a run, by running the job's `export.command` on this machine.

    \b
    Examples:
      paceline export translate-3f9a --to model
      paceline export s3://bucket/path/translate-3f9a --snapshot best --to model --job job.yaml

    DIR appears only when the model is complete. Its paceline.json describes the model's inputs and outputs.
    """
    if not to:
        fail("--to DIR is required")
    from paceline.client.models import job_programs, model_export

    folder = expanded(to)
    model_export.check(folder)
    with (
        restored(
            run,
            snapshot,
            on,
            context,
            namespace,
            endpoint,
            lambda source: job_programs.find(source, "export", job, code),
        ) as (
            program,
            restored_snapshot,
            manifest,
        ),
        interrupt_on_signals(),
    ):
        about = model_export.export(program, restored_snapshot.folder, manifest.run, manifest.id, folder)
    tell(f"exported {manifest.id} of {manifest.run} to {folder}: {_description(about)}")
    return 0


def _description(about: dict[str, object]) -> str:
    signatures = about["signatures"]
    names = ", ".join(signatures) if isinstance(signatures, dict) else ""
    return f"{about['format']}, {names}" if names else str(about["format"])
