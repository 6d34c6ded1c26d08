"""Lists all runs in a namespace, of all users, from the captains' Jobs and pods."""

from __future__ import annotations

import time
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod

from paceline.agent.run_files import stamp
from paceline.backends.kubernetes.api import pending_reasons
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.api.owners import controller
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs.mirror import finished
from paceline.backends.kubernetes.runs.running import captain_report
from paceline.plan import CAPTAIN
from paceline.view.state.status_reader import ABANDONED

SUBMISSION_S = 300.0  # a submission that takes longer was interrupted


def list_runs(cluster: Cluster) -> list[dict[str, Any]]:
    """The fields of a report for each run, newest first."""
    labels: dict[str, Any] = {"app.kubernetes.io/managed-by": "paceline", names.ROLE_LABEL: CAPTAIN}
    jobs: list[Any] = cluster.request("list Jobs", lambda: list(cluster.client.list(Job, labels=labels)))
    pods: dict[str, list[Any]] = {}
    captains: list[Any] = cluster.request("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    for pod in captains:
        pods.setdefault(str((pod.metadata.labels or {}).get(names.RUN_LABEL)), []).append(pod)
    paused = _paused_runs(cluster)
    reports = [
        _report(
            job,
            job.metadata.name in paused,
            [pod for pod in pods.get(job.metadata.name, []) if controller(pod) == job.metadata.uid],
        )
        for job in jobs
    ]
    return sorted(reports, key=lambda report: (report["started"], report["run"]), reverse=True)


def _paused_runs(cluster: Cluster) -> set[str]:
    """Runs whose members have no pods, because their Jobs are suspended. Those that are being submitted have no captain
    yet."""
    labels: dict[str, Any] = {"app.kubernetes.io/managed-by": "paceline"}
    suspended: dict[str, bool] = {}
    for job in cluster.request("list Jobs", lambda: list(cluster.client.list(Job, labels=labels))):
        about = (job.metadata and job.metadata.labels) or {}
        if about.get(names.ROLE_LABEL, CAPTAIN) != CAPTAIN:
            run = str(about.get(names.RUN_LABEL))
            suspended[run] = suspended.get(run, True) and bool(job.spec and job.spec.suspend)
    return {run for run, is_suspended in suspended.items() if is_suspended}


def _report(job: Any, is_paused: bool, pods: list[Any]) -> dict[str, Any]:
    created = job.metadata.creationTimestamp.timestamp()
    report = {"run": job.metadata.name, "started": stamp(created), "ended": None, "reason": "", "restarts": None}
    if finished(job):
        conditions = [each for each in job.status.conditions if each.type in ("Complete", "Failed")]
        failed = next((each for each in conditions if each.type == "Failed"), None)
        ended = conditions[0].lastTransitionTime
        failure = {"status": "failed", "reason": f"{failed.reason}: {failed.message}"} if failed else {}
        outcome = {"status": "succeeded", "ended": stamp(ended.timestamp()) if ended else None, **failure}
        return {**report, **outcome, **(captain_report(pods) or {}), "started": report["started"]}
    if job.spec and job.spec.suspend:
        is_abandoned = time.time() - created > SUBMISSION_S
        return {**report, "status": "abandoned", "reason": ABANDONED.format(job.metadata.name)} if is_abandoned else {
            **report, "status": "starting", "reason": "being submitted, or the submission was interrupted",
        }  # fmt: skip
    is_running = any(pod.status and pod.status.phase == "Running" for pod in pods)
    why = next(filter(None, (pending_reasons.of_pod(pod.to_dict(), CAPTAIN) for pod in pods)), None)
    status = "starting" if not is_running else "paused" if is_paused else "running"
    return {**report, "status": status, "reason": "" if is_running else str(why or "")}
