"""All runs in a namespace, whoever submitted them, as the captains' Jobs and pods tell."""

from __future__ import annotations

import time
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod

from paceline.agent.journal import stamp
from paceline.backends.kubernetes import names, reasons
from paceline.backends.kubernetes.cluster import Cluster
from paceline.backends.kubernetes.mirror import finished
from paceline.backends.kubernetes.running import spoken
from paceline.plan import CAPTAIN
from paceline.view.state import ABANDONED

SUBMITTED_S = 300.0  # a submission that takes longer was cut short


def listed(cluster: Cluster) -> list[dict[str, Any]]:
    """The fields of a report for each, newest first."""
    labels: dict[str, Any] = {"app.kubernetes.io/managed-by": "paceline", names.ROLE_LABEL: CAPTAIN}
    jobs: list[Any] = cluster.ask("list Jobs", lambda: list(cluster.client.list(Job, labels=labels)))
    pods: dict[str, list[Any]] = {}
    captains: list[Any] = cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    for pod in captains:
        pods.setdefault(str((pod.metadata.labels or {}).get(names.RUN_LABEL)), []).append(pod)
    found = [_report(job, pods.get(job.metadata.name, [])) for job in jobs]
    return sorted(found, key=lambda report: (report["started"], report["run"]), reverse=True)


def _report(job: Any, pods: list[Any]) -> dict[str, Any]:
    created = job.metadata.creationTimestamp.timestamp()
    report = {"run": job.metadata.name, "started": stamp(created), "ended": None, "reason": "", "restarts": None}
    if finished(job):
        conditions = [each for each in job.status.conditions if each.type in ("Complete", "Failed")]
        failed = next((each for each in conditions if each.type == "Failed"), None)
        ended = conditions[0].lastTransitionTime
        told = {"status": "failed", "reason": f"{failed.reason}: {failed.message}"} if failed else {}
        words = {"status": "succeeded", "ended": stamp(ended.timestamp()) if ended else None, **told}
        return {**report, **words, **(spoken(pods) or {})}
    if job.spec and job.spec.suspend:
        late = time.time() - created > SUBMITTED_S
        return {**report, "status": "abandoned", "reason": ABANDONED.format(job.metadata.name)} if late else {
            **report, "status": "starting", "reason": "is being submitted, or was given up in the middle of that",
        }  # fmt: skip
    runs = any(pod.status and pod.status.phase == "Running" for pod in pods)
    why = next(filter(None, (reasons.of_pod(pod.to_dict(), CAPTAIN) for pod in pods)), None)
    return {**report, "status": "running" if runs else "starting", "reason": "" if runs else str(why or "")}
