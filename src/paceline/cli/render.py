"""`paceline render`: every Kubernetes object of a run, as YAML; nothing is asked of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import JobArgument, SetOption
from paceline.cli.say import tell


def main(
    job: JobArgument = "job.yaml",
    overrides: SetOption = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="The run's id; a new one where it is left out.")
    ] = None,
    with_certificates: Annotated[
        bool, typer.Option("--with-certificates", help="Put new certificates into the Secret, for `kubectl apply`.")
    ] = False,
) -> None:
    """Print every Kubernetes object of a run, in the order in which they are made. Nothing is asked of a cluster.

    \b
    paceline render job.yaml --with-certificates | kubectl apply -f -

    With a given run id the output is the same, byte for byte, and holds no secret unless certificates are asked for.
    """
    from paceline.backends.ids import new_run
    from paceline.backends.kubernetes.archive import agent_archive
    from paceline.backends.kubernetes.prepare import certificates, prepare
    from paceline.backends.kubernetes.render import render
    from paceline.job import load
    from paceline.view.yaml import dump

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
