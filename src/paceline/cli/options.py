"""Options and arguments that several verbs share, with their completion."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_runs(incomplete: str) -> list[tuple[str, str]]:
    from paceline.view import runs

    try:
        found = runs.every()
    except runs.NoRun:
        return []
    return [(run.name, _standing(run.folder)) for run in found if run.name.startswith(incomplete)]


def _standing(folder: object) -> str:
    from pathlib import Path

    from paceline.view import runs

    path = Path(str(folder))
    report = runs.read_object(path / "report.json")
    return str(report.get("status")) if report else "running" if runs.alive(path) else "failed"


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="A run's id, or the beginning of it; the newest run where it is left out.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
ReadArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="A run's id or its beginning, the newest if left out; or s3://bucket/path/RUN, of a run on a cluster.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a field of the job file; repeatable.", show_default=False),
]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="The context of the kubeconfig; its current one if left out."),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("-n", "--namespace", metavar="NAME", help="The namespace; the context's own if left out."),
]
OnOption = Annotated[
    str, typer.Option("--on", metavar="WHERE", help="kubernetes: look on the cluster, for a run of somebody else too.")
]
JsonOption = Annotated[
    str, typer.Option("-o", "--output", metavar="json", help="Print JSON.", autocompletion=lambda: ["json"])
]
