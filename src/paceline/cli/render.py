"""`paceline render`: prints every Kubernetes object of a run as YAML, without contacting a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import JobArgument, SetOption
from paceline.cli.output import one_of, print_json, tell


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
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="yaml|json", help="Output format.", autocompletion=lambda: ["yaml", "json"]
        ),
    ] = "yaml",
) -> None:
    """Print every Kubernetes object of a run, in the order of their creation, without contacting a cluster.

    \b
    Example:
      paceline render job.yaml --with-certificates | kubectl apply -f -

    For the same job and run id, the output is the same, byte for byte. It contains no secrets, except those of the job
    file and, with --with-certificates, the keys of the run.
    """
    one_of(output, ("yaml", "json"))
    from paceline.backends.kubernetes.payload.prepare import prepare
    from paceline.client.jobs import rendered
    from paceline.job import load

    prepared = prepare(load(Path(job), overrides or [], cluster=True))
    for note in prepared.notes:
        tell(f"note: {note}")
    objects = rendered(prepared, run, with_certificates)
    if output == "json":
        print_json(objects.to_dict())
    else:
        print(objects, end="", flush=True)
