"""A run on a cluster that this process follows: stops and kills it, and writes its report."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from paceline.agent.run_files import replace, stamp
from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.api.pending_reasons import Reason
from paceline.backends.kubernetes.objects import names, pods
from paceline.backends.kubernetes.runs.foreign_pods import own_captains
from paceline.backends.kubernetes.runs.mirror import Mirror
from paceline.plan import CAPTAIN
from paceline.storage.json_values import parse_json
from paceline.view.files import run_folders
from paceline.view.files.run_files import REPORT
from paceline.view.state import run_state, status_reader

DRAIN_S = 5.0
STOP_REASON = "asked"  # a file with the reason why the user ended the Jobs, if the captain did not respond
WHOLE = "whole"  # a marker file: all output of the run was fetched
STOP_S = 15
SUMMARY = ("status", "reason", "cause", "generations", "steps", "steps_per_s", "started", "ended")
STUCK_S = 30.0  # seconds; a captain's pod that was deleted longer ago is on a lost node, and has fenced itself


@dataclass
class Running:
    cluster: Cluster
    run: str
    folder: Path
    mirror: Mirror
    _given_up: Reason | None = None
    _forced: set[str] = field(default_factory=set)

    def close(self) -> None:
        """Close its files and connections. If it was started, `mirror.stop` closes the connections."""
        self.mirror.inbox.close()
        self.cluster.close()

    def ended(self, timeout: float) -> bool:
        self.mirror.save_pods()
        self._free_captain()
        if self._given_up is None:
            self._given_up = self.mirror.fatal_reason
            if self._given_up is not None:
                self.end_jobs()
                self.kill_pods()  # no task has run yet, and a shell that starts as PID 1 ignores SIGTERM
        if not self.mirror.over.wait(timeout):
            return False
        report = self._captain_report()
        if report and report.get("cause") == "start-timeout":
            self.end_jobs()  # pods that start only now would occupy resources for nothing
        if self.mirror.drained(DRAIN_S) and not self.mirror.output_incomplete:
            (self.folder / WHOLE).touch()
        self.mirror.save_pods(at_once=True)
        self.write_report()
        return True

    def _free_captain(self) -> None:
        """The cluster replaces a captain's pod on a lost node only when it removes the node, which takes long."""
        for pod in self.mirror.stuck_captains(STUCK_S):
            if pod.uid not in self._forced:
                self._forced.add(pod.uid)
                self.mirror.inbox.note(f"{pod.pod} is on a lost node ({pod.node}): deleting it, so that it is replaced")
                threading.Thread(target=self._force, args=(pod.pod,), daemon=True).start()

    def _force(self, pod: str) -> None:
        """Delete a pod without its finalizer: the Job would wait forever for the outcome of the pod."""
        self._end_pods([pod])
        patch: dict[str, Any] = {"metadata": {"finalizers": None}}
        try:
            self.cluster.request(
                "remove the finalizers of a pod",
                partial(self.cluster.client.patch, Pod, pod, patch, patch_type=PatchType.MERGE),
            )
        except (Refused, Unreachable):
            pass

    def stop(self, reason: str, interrupt: bool = False) -> bool:
        """Ask the captain, from inside its own pod; if that fails, end the pods with their grace period. `interrupt`
        has no effect: tasks get SIGTERM, as for every other reason to end a pod."""
        for pod in self._captains():
            try:  # its output is not kept: a pod can write any amount
                answer = self.cluster.client.exec(
                    pod.metadata.name, container=CAPTAIN, command=stop_command(reason), timeout=STOP_S
                )
                if not answer.exit_code:
                    return True
            except Exception:  # whatever failed, the cluster can still end the pods
                continue
        (self.folder / STOP_REASON).write_text(reason)
        is_accepted = self.end_jobs()
        if not is_accepted:
            (self.folder / STOP_REASON).unlink()
        return is_accepted

    def captain_pod(self) -> str:
        """The name of the captain's pod; empty if none is running. Refused, Unreachable: it is not known."""
        captains = own_captains(self._list_pods({**self._labels(), names.ROLE_LABEL: CAPTAIN}), self.folder)
        running = [pod for pod in captains if pod.status and pod.status.phase == "Running"]
        return str(running[-1].metadata.name) if running else ""

    def is_undecided(self) -> bool:
        """Whether the captain has not reported how the run ended."""
        return self._captain_report() is None

    def kill(self, reason: str = "killed immediately, without a grace period") -> bool:
        """Kill all pods immediately, without their grace period. Whether the cluster accepted it."""
        (self.folder / STOP_REASON).write_text(reason)
        is_accepted = self.end_jobs()
        if not is_accepted:
            (self.folder / STOP_REASON).unlink()
        return self.kill_pods() and is_accepted

    def kill_pods(self) -> bool:
        """Also pods on lost nodes, which only a forced deletion removes. Whether the cluster accepted it."""
        try:
            return self._end_pods([pod.metadata.name for pod in self._list_pods(self._labels())])
        except (Refused, Unreachable):
            return False

    def _end_pods(self, pods: list[str]) -> bool:
        is_accepted = True
        for pod in pods:
            try:
                self.cluster.request("end a pod", partial(self.cluster.client.delete, Pod, pod, grace_period=0))
            except Refused as refused:
                is_accepted = is_accepted and refused.reason == "NotFound"  # deleted in the meantime
            except Unreachable:
                return False
        return is_accepted

    def end_jobs(self) -> bool:
        """End the Jobs by their deadline: pods get SIGTERM and their grace period. Whether the cluster accepted it."""
        patch = {"spec": {"activeDeadlineSeconds": 1}}
        try:
            jobs = self.cluster.request("list Jobs", lambda: list(self.cluster.client.list(Job, labels=self._labels())))
            for job in jobs:
                name = job.metadata.name if job.metadata else ""
                end = partial(self.cluster.client.patch, Job, name, patch, patch_type=PatchType.MERGE)
                try:
                    self.cluster.request(f"end the Job {name}", end)
                except Refused as refused:
                    if refused.reason != "NotFound":  # not deleted in the meantime
                        raise
        except (Refused, Unreachable):
            return False
        return True

    def _pods(self, more: dict[str, str] | None = None) -> list[Any]:
        try:
            return self._list_pods({**self._labels(), **(more or {})})
        except (Refused, Unreachable):
            return []

    def _list_pods(self, labels: dict[str, Any]) -> list[Any]:
        return self.cluster.request("list pods", lambda: list(self.cluster.client.list(Pod, labels=labels)))

    def _captain_report(self) -> dict[str, Any] | None:
        return captain_report(self._captains())

    def _captains(self) -> list[Any]:
        return own_captains(self._pods({names.ROLE_LABEL: CAPTAIN}), self.folder)

    def _labels(self) -> dict[str, Any]:
        return {names.RUN_LABEL: self.run}

    def write_report(self) -> None:
        """From the termination message of the captain, even if its events are missing."""
        outcome = self._captain_report()
        current = status_reader.read(run_folders.Run(self.run, self.folder))
        if outcome is None and self._given_up is not None:
            outcome = {"status": "failed", "reason": str(self._given_up), "cause": self._given_up.cause}
        if outcome is None and current.state.ended is not None:
            outcome = {}
        if outcome is None and (self.folder / STOP_REASON).exists():
            outcome = {"status": "stopped", "reason": (self.folder / STOP_REASON).read_text(), "cause": None}
        if outcome is None:
            outcome = {"cause": None, **self._job_outcome()}
        if outcome.get("cause") == "start-timeout":
            outcome = {**outcome, "reason": _with_reasons(str(outcome.get("reason")), self.mirror.last_reasons)}
            self.end_jobs()
        ended = current.report.get("ended") or stamp()
        report = {**current.report, "ended": ended, "restarts": current.state.followed_restarts, **outcome}
        replace(str(self.folder / "report.json"), report)

    def _job_outcome(self) -> dict[str, str]:
        """From the Job itself, for example its deadline."""
        if self.mirror.job_deleted:
            return {"status": "failed", "reason": run_folders.JOB_DELETED_REASON, "cause": run_folders.JOB_DELETED}
        jobs: list[Any] = []
        try:
            jobs = [self.cluster.request("read the Job", partial(self.cluster.client.get, Job, self.run))]
        except (Refused, Unreachable):
            pass
        for job in jobs:
            for each in (job.status.conditions if job.status else None) or []:
                if each.type == "Complete" and each.status == "True":
                    return {"status": "succeeded", "reason": ""}
                if each.type == "Failed" and each.status == "True":
                    return {"status": "failed", "reason": f"its Job failed: {each.reason}: {each.message}"}
        return {"status": "failed", "reason": "its captain ended without a report"}


def stop_command(reason: str) -> list[str]:
    """Asks the captain to stop, inside its pod. An agent of another version may lack that module: then the run is ended
    through its Jobs, with the grace period of its pods."""
    script = (
        f"export PYTHONPATH={pods.AGENT}:{pods.AGENT_FOLDER}/agent.pyz; for p in python3 python; do "
        'command -v $p >/dev/null && exec $p -m paceline.agent.net.stop_request "$@"; done'
    )
    return ["/bin/sh", "-c", script, "sh", f"127.0.0.1:{names.CAPTAIN_PORT}", pods.TLS_FOLDER, CAPTAIN, reason]


def captain_report(captains: list[Any]) -> dict[str, Any] | None:
    """How the run has ended, from the termination message of a captain. Whoever may create pods may have written it."""
    for pod in captains:
        for status in (pod.status.containerStatuses or []) if pod.status else []:
            ended = status.state.terminated if status.state else None
            try:
                report = parse_json(ended.message or "") if ended else None
            except ValueError:
                report = None
            if isinstance(report, dict) and report.get("status") in run_state.ENDED:
                return {name: report[name] for name in SUMMARY if name in report and REPORT[name](report[name])}
    return None


def _with_reasons(reason: str, waiting: list[Reason]) -> str:
    """The captain reports which hosts are missing, the cluster why."""
    details = "; ".join(str(each) for each in waiting[:3] if str(each) not in reason)
    return f"{reason}; {details}" if details else reason
