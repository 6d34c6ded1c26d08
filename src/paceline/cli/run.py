"""`paceline run`: load, plan, start; then follow the run to its end, or leave it running."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ContextOption, NamespaceOption, SetOption
from paceline.cli.say import fail, one_of, tell
from paceline.cli.verb import Verb

if TYPE_CHECKING:
    from paceline.job import Loaded
    from paceline.plan import Plan

_COMMAND = "command"


class COMMAND(Verb):
    """Keeps what stands behind `--` apart, so that no option of the person's program is taken for one of ours."""

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
            help="The job file (job.yaml where it is left out); or, behind --, a command to run without one.",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the job: run ids begin with it.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="The run's id; made from the job's name if left out.")
    ] = None,
    on: Annotated[str, typer.Option("--on", metavar="WHERE", help="local (this machine) or kubernetes.")] = "local",
    context_name: ContextOption = None,
    namespace: NamespaceOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running, and print its id.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; start nothing.")] = False,
    ingest: Annotated[
        bool, typer.Option("--ingest", help="Make the data anew (`ingest`), though it is there.")
    ] = False,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="json", help="Print the report as JSON, and nothing else, on stdout."),
    ] = "",
    framework: Annotated[
        str | None, typer.Option("--framework", metavar="NAME", help="tensorflow, torch, jax or none.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-w", metavar="N", help="How many workers.")] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="NAME", help="multi-worker or parameter-server (tensorflow).")
    ] = None,
    ps: Annotated[int | None, typer.Option("--ps", metavar="N", help="How many parameter servers.")] = None,
    chief: Annotated[bool, typer.Option("--chief", help="With a chief.")] = False,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="With an evaluator.")] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", help="GPUs for each worker's host.")] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Write the job file of a command.")] = None,
) -> int:
    """Run a job on this machine, or on a Kubernetes cluster.

    \b
    paceline run job.yaml --set roles.worker.replicas=4
    paceline run --framework torch --workers 4 -- python train.py --epochs 3
    paceline run job.yaml --on kubernetes -n team-a

    Ctrl-C stops the run and gives its tasks time to finish; Ctrl-C again ends them at once. Exit codes: 0 succeeded,
    1 failed, 2 wrong usage or job file, 130 interrupted.
    """
    output = one_of(output, ("json", "yaml") if dry_run else ("json",))
    on = one_of(on, ("local", "kubernetes"), "--on")
    command = context.meta.get(_COMMAND)
    shape = {
        "--framework": framework, "--workers": workers, "--strategy": strategy, "--ps": ps, "--chief": chief,
        "--evaluator": evaluator, "--gpus": gpus, "--save": save,
    }  # fmt: skip
    given = [option for option, value in shape.items() if value not in (None, False)]
    from paceline.cli.remembered import plan_of

    cluster = on == "kubernetes"
    if not cluster and (context_name or namespace):
        fail("--context and --namespace are for --on kubernetes")
    if command is None:
        path = _job_file(job or [], given)
        changes = [*(overrides or []), *([f"name={name}"] if name else [])]
        if cluster:
            from paceline.cli.submitting import run_on_kubernetes
            from paceline.job import load

            return run_on_kubernetes(
                load(path, changes, cluster=True), context_name, namespace, run, detach, dry_run, output, ingest
            )
        from paceline.cli.remembered import plan_of_file

        planned = plan_of_file(path, changes)
    else:
        if job:
            fail(f"{job[0]!r} and a command behind --: give a job file or a command, not both")
        if not command:
            fail("there is no command behind --")
        from paceline.job import from_command

        text = from_command(
            framework=framework or "none", workers=1 if workers is None else workers, strategy=strategy, ps=ps or 0,
            chief=chief, evaluator=evaluator, gpus=gpus, name=name, command=command, folder=Path.cwd(),
        )  # fmt: skip
        loaded = _from_text(text, overrides or [], save, cluster)
        if cluster:
            from paceline.cli.submitting import run_on_kubernetes

            return run_on_kubernetes(loaded, context_name, namespace, run, detach, dry_run, output, ingest)
        planned = plan_of(loaded)
    for note in planned.notes:
        tell(f"note: {note}")
    plan = _with_places(data_anew(planned.plan) if ingest else planned.plan, dry_run)
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
        return _left_running(run, folder, output)

    from paceline.cli.follow import Signals, follow

    with Signals() as signals:
        run, folder = local.create(plan, planned.text, run)
        running = local.start(plan, run, folder, detach=False, page=page)
        return follow(running, run, folder, plan.written, plan.limits.grace, signals, output)


def data_anew(plan: Plan) -> Plan:
    from dataclasses import replace

    if plan.ingest is None:
        fail("--ingest: the job has no ingest")
    return replace(plan, ingest=replace(plan.ingest, again=True))


def _with_places(plan: Plan, dry_run: bool) -> Plan:
    """Before anything starts: what it starts from is found, and a bucket answers."""
    if not plan.snapshots.origin and not plan.snapshots.in_bucket:
        return plan
    from paceline.view import origin

    plan = origin.resolved(plan)
    if not dry_run:
        origin.check(plan)
    return plan


def _job_file(words: Sequence[str], given: Sequence[str]) -> Path:
    if len(words) > 1 or (words and given and not words[0].endswith((".yaml", ".yml", ".json"))):
        fail(f"a command goes behind --: paceline run {' '.join([*given, '...'][:2])} -- {' '.join(words)}")
    if given:
        where = words[0] if words else "the job file"
        fail(f"{given[0]} is for commands without a job file (behind --); what {where} says is changed with --set")
    path = words[0] if words else "job.yaml"
    if not words and not Path(path).exists():
        fail("no job.yaml in this folder; `paceline init` writes one, or name a job file")
    return Path(path)


def _from_text(text: str, overrides: list[str], save: str | None, cluster: bool) -> Loaded:
    from paceline.job import load_text

    loaded = load_text(text, save or "the command line", Path.cwd(), overrides, cluster=cluster)
    if save:
        path = Path(save)
        if path.exists() and path.read_text(errors="replace") != loaded.text:
            fail(f"{save} is there already; delete it, or save to another name")
        path.write_text(loaded.text, encoding="utf-8")
        tell(f"wrote {save}; the same again: paceline run {save}")
    return loaded


def _left_running(run: str, folder: Path, output: str) -> int:
    if output == "json":
        from paceline.cli.say import print_json
        from paceline.view import runs, state

        print_json(state.read(runs.Run(run, folder)).report)
    else:
        print(run, flush=True)
    tell(f"running; follow it with: paceline logs -f {run}")
    return 0
