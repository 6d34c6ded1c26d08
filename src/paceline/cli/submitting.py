"""`paceline run --on kubernetes`: submit, then follow the run to its end, or leave it running."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.say import complain, print_json, tell

if TYPE_CHECKING:
    from paceline.backends.kubernetes.cluster import Cluster
    from paceline.backends.kubernetes.prepare import Prepared
    from paceline.job import Loaded
    from paceline.plan import Plan

_TRIES = 5  # an id that is made up may be taken


def run_on_kubernetes(
    loaded: Loaded,
    context: str | None,
    namespace: str | None,
    wanted: str | None,
    detach: bool,
    dry_run: bool,
    output: str,
    ingest: bool = False,
) -> int:
    from paceline.backends.kubernetes.prepare import prepare

    prepared = prepare(loaded)
    if ingest:
        from paceline.cli.run import data_anew

        prepared = replace(prepared, plan=data_anew(prepared.plan))
    for note in prepared.notes:
        tell(f"note: {note}")
    plan = prepared.plan
    if dry_run:
        from paceline.cli.plan import show

        show(plan, output or "yaml")
        return 0

    from paceline.backends.kubernetes import known
    from paceline.backends.kubernetes.cluster import connect
    from paceline.backends.kubernetes.submit import Interrupted
    from paceline.cli.follow import Signals, follow

    cluster = connect(context or plan.kubernetes["context"], namespace or plan.kubernetes["namespace"])
    with Signals() as signals:
        try:
            with _submitted(prepared, cluster, wanted, lambda: signals.asked) as folder:
                run = folder.name
                if shown := _published(cluster, run, plan):
                    tell(shown)
                where = f"{run} is in namespace {cluster.namespace} of {cluster.context}"
                if detach:
                    words = {"run": run, "namespace": cluster.namespace}
                    print_json(words) if output == "json" else print(run, flush=True)
                    tell(f"{where}; follow it with: paceline logs -f {run}")
                    return 0
                tell(where)
                running = known.reopen(folder, cluster)
                running.mirror.start()
                return follow(running, run, folder, plan.written, plan.limits.grace, signals, output)
        except Interrupted as error:
            complain(str(error), word="interrupted")
            return 130


def _published(cluster: Cluster, run: str, plan: Plan) -> str:
    from paceline.backends.kubernetes.board import published
    from paceline.backends.kubernetes.cluster import Refused, Unreachable

    try:
        return published(cluster, run, plan.tensorboard)
    except (Refused, Unreachable):
        return ""


@contextmanager
def _submitted(
    prepared: Prepared, cluster: Cluster, wanted: str | None, interrupted: Callable[[], bool]
) -> Iterator[Path]:
    """The folder of the new run, held for as long as it is followed."""
    from paceline.backends.ids import new_run
    from paceline.backends.kubernetes import known
    from paceline.backends.kubernetes.archive import agent_archive
    from paceline.backends.kubernetes.inbox import held
    from paceline.backends.kubernetes.prepare import Taken, certificates
    from paceline.backends.kubernetes.render import render
    from paceline.backends.kubernetes.submit import Left, submit

    there = {**prepared.plan.kubernetes, "namespace": cluster.namespace}
    plan, agent, secrets = replace(prepared.plan, kubernetes=there), agent_archive(), certificates()
    for left in reversed(range(1 if wanted else _TRIES)):
        run = new_run(plan.name, wanted)
        objects = render(plan, run, agent, prepared.code, secrets, suspended=True, library=prepared.library)
        try:
            # Before there is anything on the cluster: whatever happens to us, `ls` and `delete` know of the run.
            folder = known.make_folder(plan, prepared.text, cluster, run)
        except Taken:
            if not left:
                raise
            continue
        with held(folder):
            try:
                submit(cluster, run, objects, interrupted, partial(known.mark_begun, folder))
            except Left:
                raise
            except BaseException as error:
                shutil.rmtree(folder, ignore_errors=True)
                if isinstance(error, Taken) and left:
                    continue
                raise
            known.mark_submitted(folder)
            yield folder
            return
