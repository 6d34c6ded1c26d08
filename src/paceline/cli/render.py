"""`paceline render`: prints every Kubernetes object of a run as YAML, without contacting a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import JobArgument, SetOption
from paceline.cli.output import tell


def main(
    job: JobArgument = "job.yaml",
    overrides: SetOption = None,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Run id (default: a new one).")] = None,
    with_certificates: Annotated[
        bool,
        typer.Option(
            "--with-certificates",
            help="Include newly created certificates in the Secret. Required to start the run with `kubectl apply`.",
        ),
    ] = False,
) -> None:
    """Print every Kubernetes object of a run, in the order of their creation, without contacting a cluster.

    \b
    Example:
      paceline render job.yaml --with-certificates | kubectl apply -f -

    For the same job and run id, the output is the same, byte for byte. It contains no secrets, except those of the job
    file and, with --with-certificates, the keys of the run.
    """
    from paceline.backends.kubernetes.objects.run_objects import render
    from paceline.backends.kubernetes.payload.agent_archive import agent_archive
    from paceline.backends.kubernetes.payload.prepare import certificates, prepare
    from paceline.backends.run_ids import new_run
    from paceline.job import load
    from paceline.view.yaml_output import dump

    prepared = prepare(load(Path(job), overrides or [], cluster=True))
    for note in prepared.notes:
        tell(f"note: {note}")
    objects = render(
        prepared.plan,
        new_run(prepared.plan.name, run),
        agent_archive(),
        prepared.code,
        certificates() if with_certificates else None,
        library=prepared.library,
    )
    print("".join(f"---\n{dump(each)}" for each in objects), end="", flush=True)
