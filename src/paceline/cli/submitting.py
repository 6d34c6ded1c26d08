"""`paceline run --on kubernetes`: submit, then follow the run to its end, or leave it running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli.say import print_json, tell

if TYPE_CHECKING:
    from paceline.job import Loaded


def run_on_kubernetes(
    loaded: Loaded, context: str | None, namespace: str | None, detach: bool, dry_run: bool, output: str
) -> int:
    from paceline.backends.kubernetes.archive import agent_archive
    from paceline.backends.kubernetes.prepare import certificates, new_run, prepare
    from paceline.backends.kubernetes.render import render

    prepared = prepare(loaded)
    for note in prepared.notes:
        tell(f"note: {note}")
    plan = prepared.plan
    if dry_run:
        from paceline.cli.plan import show

        show(plan, output or "yaml")
        return 0

    from paceline.backends.kubernetes.cluster import connect
    from paceline.backends.kubernetes.mirror import Mirror
    from paceline.backends.kubernetes.running import Running, make_folder
    from paceline.backends.kubernetes.submit import submit
    from paceline.cli.follow import Signals, follow

    settings = plan.kubernetes
    cluster = connect(context or settings["context"], namespace or settings["namespace"])
    run = new_run(plan)
    objects = render(plan, run, agent_archive(), prepared.code, certificates(), suspended=True)
    with Signals() as signals:
        submit(cluster, run, objects)
        folder = make_folder(prepared, cluster, run)
        where = f"{run} is in namespace {cluster.namespace} of {cluster.context}"
        if detach:
            print_json({"run": run, "namespace": cluster.namespace}) if output == "json" else print(run, flush=True)
            tell(f"{where}; see: kubectl get jobs,pods -n {cluster.namespace} -l paceline.dev/run={run}")
            return 0
        tell(where)
        mirror = Mirror(cluster, run, folder, len(plan.hosts))
        mirror.start()
        running = Running(cluster, run, folder, mirror)
        return follow(running, run, folder, [task.name for task in plan.tasks], plan.limits.grace, signals, output)
