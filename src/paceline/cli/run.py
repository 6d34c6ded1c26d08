"""`paceline run`: loads a job, plans and starts it, then follows the run to its end or detaches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ContextOption, NamespaceOption, SetOption
from paceline.cli.output import fail, one_of, print_error, print_json, tell
from paceline.cli.typer_commands import Verb

if TYPE_CHECKING:
    from paceline.client.reading.find_run import Target
    from paceline.job import LoadedJob

_COMMAND = "command"


class COMMAND(Verb):
    """Separates the command after `--`, so that its options are not parsed as ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_COMMAND] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "[JOB | -- COMMAND...]"]


def main(
    context: typer.Context,
    job: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB",
            help="Job file (default: job.yaml). To run a command without a job file, put it after --.",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Job name; the run id starts with it.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Run id (default: the job name with a random suffix).")
    ] = None,
    on: Annotated[
        str,
        typer.Option("--on", metavar="local|kubernetes", help="Where to run: this machine or a Kubernetes cluster."),
    ] = "local",
    context_name: ContextOption = None,
    namespace: NamespaceOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the run id and return while the run continues.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without starting anything.")] = False,
    ingest: Annotated[
        bool, typer.Option("--ingest", help="Rebuild the data with the job's `ingest`, even if it exists.")
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="json",
            help="Print JSON on stdout: only the final report; with --detach, the run id; with --dry-run, the plan.",
        ),
    ] = "",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also show the start-up messages of frameworks; the logs always contain them."
        ),
    ] = False,
    framework: Annotated[
        str | None, typer.Option("--framework", metavar="NAME", help="tensorflow, torch, jax or none (default: none).")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            metavar="N",
            help="Number of worker hosts (default: 1). Each runs one worker, or one per GPU with --gpus.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="NAME", help="TensorFlow strategy: multi-worker or parameter-server."),
    ] = None,
    ps: Annotated[int | None, typer.Option("--ps", metavar="N", help="Number of parameter servers.")] = None,
    chief: Annotated[bool, typer.Option("--chief", help="Add a chief.")] = False,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="Add an evaluator.")] = False,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="GPUs per worker host; each host runs one worker per GPU."),
    ] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Save the command as a job file.")] = None,
) -> int:
    """Run a job on this machine or on a Kubernetes cluster.

    \b
    Examples:
      paceline run job.yaml --set roles.worker.replicas=4
      paceline run --framework torch --workers 4 -- python train.py --epochs 3
      paceline run job.yaml --on kubernetes -n team-a

    The options --framework through --save can be used only with a command after --. With a job file, use --set.

    Ctrl-C interrupts the tasks and gives them time to finish; a second Ctrl-C kills them immediately.

    Exit codes: 0 succeeded, 1 failed, 2 wrong usage or invalid job file, 130 stopped
    (Ctrl-C or `paceline stop`).
    """
    output = one_of(output, ("json", "yaml") if dry_run else ("json",))
    on = one_of(on, ("local", "kubernetes"), "--on")
    command = context.meta.get(_COMMAND)
    shape = {
        "--framework": framework, "--workers": workers, "--strategy": strategy, "--ps": ps, "--chief": chief,
        "--evaluator": evaluator, "--gpus": gpus, "--save": save,
    }  # fmt: skip
    command_options = [option for option, value in shape.items() if value not in (None, False)]
    from paceline.client.reading.find_run import Target
    from paceline.client.submission.plan_cache import plan_of

    target = Target(on, context_name, namespace)
    cluster = target.is_cluster
    if command is None:
        path = _job_file(job or [], command_options)
        changes = [*(overrides or []), *([f"name={name}"] if name else [])]
        if cluster:
            from paceline.job import load

            return _run_on_kubernetes(
                load(path, changes, cluster=True), target, run, detach, dry_run, output, ingest, verbose
            )
        from paceline.client.submission.plan_cache import plan_of_file

        planned = plan_of_file(path, changes)
    else:
        if job:
            fail("give a job file or a command after --, not both", where=job[0])
        if not command:
            fail("no command given after --")
        from paceline.job.new_job_file import job_text

        text = job_text(
            framework=framework or "none", workers=1 if workers is None else workers, strategy=strategy, ps=ps or 0,
            chief=chief, evaluator=evaluator, gpus=gpus, name=name, command=command, folder=Path.cwd(),
        )  # fmt: skip
        loaded = _from_text(text, overrides or [], save, cluster)
        if cluster:
            return _run_on_kubernetes(loaded, target, run, detach, dry_run, output, ingest, verbose)
        planned = plan_of(loaded)
    for note in planned.notes:
        tell(f"note: {note}")
    from paceline.client.submission.plans import with_origin, with_rebuilt_data

    plan = with_origin(with_rebuilt_data(planned.plan) if ingest else planned.plan, check=not dry_run)
    if dry_run:
        from paceline.cli.plan import show

        show(plan, output or "yaml")
        return 0

    from paceline.backends import local

    for note in local.caveats(plan):
        tell(f"note: {note}")
    page, note = local.page_for(plan)
    if note:
        tell(f"note: {note}")
    elif page:
        tell(f"TensorBoard: http://{page}/")
    if detach:
        run, folder = local.create(plan, planned.text, run)
        local.start(plan, run, folder, detach=True, page=page)
        return _report_detached(run, folder, output)

    from paceline.cli.follow import Signals, follow

    with Signals() as signals:
        run, folder = local.create(plan, planned.text, run)
        running = local.start(plan, run, folder, detach=False, page=page)
        return follow(running, run, folder, plan.tasks_with_logs, plan.limits.grace, signals, output, verbose)


def _run_on_kubernetes(
    loaded: LoadedJob,
    target: Target,
    run_id: str | None,
    detach: bool,
    dry_run: bool,
    output: str,
    rebuild_data: bool,
    verbose: bool,
) -> int:
    from paceline.backends.kubernetes.payload.prepare import prepare
    from paceline.backends.kubernetes.runs import local_folder
    from paceline.backends.kubernetes.runs.submit import Interrupted
    from paceline.client.json_form import versioned
    from paceline.client.submission.kubernetes_submission import (
        cluster_of,
        monitor_metrics,
        published_tensorboard,
        submitted,
    )
    from paceline.client.submission.plans import with_rebuilt_data

    prepared = prepare(loaded)
    if rebuild_data:
        prepared = replace(prepared, plan=with_rebuilt_data(prepared.plan))
    for note in prepared.notes:
        tell(f"note: {note}")
    plan = prepared.plan
    if dry_run:
        from paceline.cli.plan import show

        show(plan, output or "yaml")
        return 0
    from paceline.cli.follow import Signals, follow

    cluster = cluster_of(plan, target.context, target.namespace)
    with Signals() as signals:
        try:
            with submitted(prepared, cluster, run_id, lambda: signals.stop_requested) as folder:
                run = folder.name
                if tensorboard := published_tensorboard(cluster, run, plan):
                    tell(tensorboard)
                if note := monitor_metrics(cluster, folder, plan):
                    tell(f"note: {note}")
                location = f"submitted {run} to namespace {cluster.namespace} (context {cluster.context})"
                if detach:
                    form = versioned({"run": run, "namespace": cluster.namespace})
                    print_json(form) if output == "json" else print(run)
                    sys.stdout.flush()
                    tell(f"{location}; follow it with: paceline logs -f {run}")
                    return 0
                tell(location)
                running = local_folder.reopen(folder, cluster)
                running.mirror.start()
                return follow(running, run, folder, plan.tasks_with_logs, plan.limits.grace, signals, output, verbose)
        except Interrupted as error:
            print_error(str(error), label="interrupted")
            return 130


def _job_file(arguments: Sequence[str], command_options: Sequence[str]) -> Path:
    if len(arguments) > 1 or (arguments and command_options and not arguments[0].endswith((".yaml", ".yml", ".json"))):
        example = f"paceline run {' '.join([*command_options, '...'][:2])} -- {' '.join(arguments)}"
        fail("a command must come after --", remedy=f"use: {example}")
    if command_options:
        path = arguments[0] if arguments else "the job file"
        fail(f"{command_options[0]} requires a command after --", remedy=f"to change a field of {path}, use --set")
    path = arguments[0] if arguments else "job.yaml"
    if not arguments and not Path(path).exists():
        fail("no job.yaml in this folder", remedy="`paceline init` writes one, or name a job file")
    return Path(path)


def _from_text(text: str, overrides: list[str], save: str | None, cluster: bool) -> LoadedJob:
    from paceline.job import load_text

    loaded = load_text(text, save or "the command line", Path.cwd(), overrides, cluster=cluster)
    if save:
        path = Path(save)
        if path.exists() and path.read_text(errors="replace") != loaded.text:
            fail(f"{save} already exists", remedy="delete it, or use another file name")
        path.write_text(loaded.text, encoding="utf-8")
        tell(f"wrote {save}; to run it again: paceline run {save}")
    return loaded


def _report_detached(run: str, folder: Path, output: str) -> int:
    if output == "json":
        from paceline.client.reading.run_status import report_form
        from paceline.view.files import run_folders
        from paceline.view.state import status_reader

        print_json(report_form(status_reader.read(run_folders.Run(run, folder)).report))
    else:
        print(run, flush=True)
    tell(f"running; follow it with: paceline logs -f {run}")
    return 0
