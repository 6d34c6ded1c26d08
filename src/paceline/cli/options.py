"""Options and arguments that several commands share, with their completion."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_runs(incomplete: str) -> list[tuple[str, str]]:
    from paceline.view.files import run_folders

    try:
        runs = run_folders.all_runs()
    except run_folders.NoRun:
        return []
    return [(run.name, _status(run.folder)) for run in runs if run.name.startswith(incomplete)]


def _status(folder: object) -> str:
    from pathlib import Path

    from paceline.view.files import run_files, run_folders

    path = Path(str(folder))
    report = run_files.report(path).fields
    return str(report["status"]) if report else "running" if run_folders.alive(path) else "failed"


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or a unique prefix of it (default: the newest run).",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
ReadArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or a unique prefix of it (default: the newest run); or, for a run on a cluster, the location of "
        "its snapshots: s3://bucket/path/RUN or claim://name/path/RUN.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
TensorBoardArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or a unique prefix of it (default: the newest run); or, for a run on a cluster, the location of "
        "its files in a bucket: s3://bucket/path/RUN.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field of the job file, such as roles.worker.replicas=4 (repeatable).",
        show_default=False,
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="Kubeconfig context (default: the current context)."),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("-n", "--namespace", metavar="NAME", help="Kubernetes namespace (default: the context's namespace)."),
]
OnOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="local|kubernetes",
        help="Where to look for the run. local (default): among the runs known to this machine, which include those "
        "that it submitted to clusters. kubernetes: on the cluster, which also finds other users' runs.",
    ),
]
JsonOption = Annotated[
    str, typer.Option("-o", "--output", metavar="json", help="Print JSON.", autocompletion=lambda: ["json"])
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="URL of the bucket's server (default: from your environment or from your own job). Your credentials are "
        "sent there.",
    ),
]


def seconds_of(text: str, option: str) -> float:
    """The value of an option for a duration."""
    from paceline.cli.output import fail
    from paceline.job.errors import BadValueError
    from paceline.job.values import duration

    try:
        return duration(int(text) if text.isdecimal() and len(text) < 18 else text)
    except BadValueError as error:
        remedy = error.hint or f"use {error.allowed}"
        fail(error.message, where=f"{option} {text!r}", remedy=remedy)
