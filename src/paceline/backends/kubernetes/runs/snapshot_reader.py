"""Reads snapshots inside a cluster, with a program in the captain's pod or in a short-lived pod with the claim."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightkube import codecs
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, PersistentVolumeClaim, Pod
from lightkube.types import CascadeType

from paceline import plan as plans
from paceline.backends.kubernetes.api import pending_reasons
from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.api.owners import controller
from paceline.backends.kubernetes.api.pod_exec import Program
from paceline.backends.kubernetes.objects import names, pods, run_objects
from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.backends.kubernetes.runs.foreign_pods import own_captains
from paceline.backends.kubernetes.runs.local_folder import connect_for, is_running
from paceline.plan import CAPTAIN
from paceline.view.files import run_folders
from paceline.view.files.plan_files import read_plan
from paceline.view.snapshots.snapshot_locations import NoClaim, OutOfReach, in_claim

START_S = 600.0  # seconds to wait for a pod with the claim: its image may be large, its volume on another node
QUIET_S = 5.0  # seconds until the user is told why it does not run yet
POLL_S = 0.5

# The agent in the pod may have another version or be missing: the program is sent through its standard input.
_BEGIN = """
import os, sys, tempfile
length, folder, run = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with tempfile.NamedTemporaryFile(suffix=".pyz") as file:
    while length:
        data = os.read(0, length)
        if not data:
            sys.exit(1)
        file.write(data)
        length -= len(data)
    file.flush()
    sys.path.insert(0, file.name)
    from paceline.storage.stores.peer_server import main
main(folder, run)
"""
_NO_PYTHON = "there is no Python 3.9 or newer in its image"


def command(folder: str, run: str, length: int) -> list[str]:
    """`folder`: contains the snapshots. `length`: size of the archive that is sent first."""
    script = f'{pods.EXEC_PYTHON} -I -c "$@"; done; echo "{_NO_PYTHON}" >&2; exit 1'
    return ["/bin/sh", "-c", script, "sh", _BEGIN, str(length), folder, run]


class SnapshotPod:
    """Connects to a pod with the snapshots of one run. Sends no request before the first `dial`."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        """`folder`: the local folder of the run. `note`: receives the reasons for waiting."""
        self._folder, self._run, self._note = folder, folder.name, note
        self._visit = self._visit_uid = ""  # name and uid of the Job of a pod with the claim
        self._connection: Cluster | None = None

    def dial(self) -> Program:
        if not in_claim(run_folders.Run(self._run, self._folder)) and not run_folders.alive(self._folder):
            raise OutOfReach(
                f"the snapshots of {self._run} were in its captain's pod, and were deleted with it",
                remedy="to keep those of the next run, set snapshots.to to a volume claim or a bucket "
                "(claim://name/path, s3://, gs:// or az://)",
            )
        pod, container = self._captain(), CAPTAIN
        if not pod and is_running(self._cluster, self._folder):
            raise OutOfReach(
                f"the captain of {self._run}, which has its snapshots, is not running now", remedy="try again"
            )
        plan = read_plan(self._folder)
        if not pod:
            pod, container = self._visit_pod(plan), pods.VISIT
        archive = agent_archive()
        program = Program(self._cluster, pod, container, command(pods.snapshots_folder(plan), self._run, len(archive)))
        program.sendall(archive)
        return program

    def close(self) -> None:
        """Delete the pod with the claim, if there is one, and close the connections."""
        self._end_visit()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _end_visit(self) -> None:
        if self._visit:
            job, self._visit = self._visit, ""
            delete = partial(self._cluster.client.delete, Job, job, cascade=CascadeType.BACKGROUND)
            with suppress(Refused, Unreachable):  # it ends on its own, a little later
                self._cluster.request(f"delete the Job {job}", delete)

    @property
    def _cluster(self) -> Cluster:
        if self._connection is None:
            self._connection = connect_for(self._folder)
        return self._connection

    def _captain(self) -> str:
        """The running pod of the captain; empty: there is none."""
        labels: dict[str, Any] = {names.RUN_LABEL: self._run, names.ROLE_LABEL: CAPTAIN}
        captains = own_captains(self._pods(labels), self._folder)
        return next((_name(pod) for pod in captains if _is_running(pod)), "")

    def _visit_pod(self, plan: plans.Plan) -> str:
        """A running pod with the claim, created if there is none yet."""
        if self._visit and not any(map(_is_running, self._pods_of_visit())):
            self._end_visit()  # it was idle for so long that it has ended
        if not self._visit:
            is_own = run_folders.is_own(self._folder)
            job = run_objects.visit(plan, self._run, f"paceline-visit-{secrets.token_hex(4)}", is_own)
            self._visit = str(job["metadata"]["name"])
            create = partial(self._cluster.client.create, codecs.from_dict(job))
            created: Any = self._cluster.request(
                f"create the Job {self._visit}, whose pod reads {plan.snapshots.to}", create
            )
            self._visit_uid = str(created.metadata.uid)
        started, reported, existed = time.monotonic(), "", False
        while True:
            visit_pods = self._pods_of_visit()
            if running := next(filter(_is_running, visit_pods), None):
                return _name(running)
            waited = time.monotonic() - started
            why = self._why(visit_pods, plan, waited > QUIET_S)
            existed = existed or bool(visit_pods)
            if waited > START_S or (existed and not visit_pods):
                raise OutOfReach(f"the pod to read {plan.snapshots.to} did not run: {reported or why}")
            if waited > QUIET_S and why != reported:
                reported = why
                self._note(f"waiting for a pod to read {plan.snapshots.to}: {why}")
            time.sleep(POLL_S)

    def _why(self, visit_pods: list[Any], plan: plans.Plan, with_events: bool) -> str:
        """Why no pod with the claim runs yet. OutOfReach: none will."""
        reasons = [pending_reasons.of_pod(pod.to_dict(), pods.VISIT) for pod in visit_pods]
        if with_events:
            reasons += [each for name in (self._visit, *map(_name, visit_pods)) for each in self._events(name)]
        for reason in filter(None, reasons):
            claim = plan.snapshots.claimed[0]
            if isinstance(reason, pending_reasons.MissingClaim) and self._is_missing(claim):
                raise NoClaim(f"the volume claim {claim} in {self._cluster.namespace} no longer exists")
            if reason.final:
                raise OutOfReach(f"no pod can read {plan.snapshots.to}: {reason.text}")
            return reason.text
        return "it is starting"

    def _is_missing(self, claim: str) -> bool:
        """Whoever may create events may have written that it is."""
        try:
            return self._cluster.find(PersistentVolumeClaim, claim) is None
        except Refused:
            return False  # unknown

    def _events(self, name: str) -> list[pending_reasons.Reason | None]:
        """Reasons from the events of the Job or its pod. The user may lack permission to list them."""
        fields: dict[str, Any] = {"involvedObject.name": name}
        try:
            listed = self._cluster.request("list events", lambda: list(self._cluster.client.list(Event, fields=fields)))
        except Refused:
            return []
        events = [each.to_dict() for each in listed]
        reasons = [
            pending_reasons.of_job(each, pods.VISIT) or pending_reasons.of_mount(each, pods.VISIT) for each in events
        ]
        return [reason and replace(reason, final=False) for reason in reasons]

    def _pods_of_visit(self) -> list[Any]:
        """Others may create pods with the same label, and answer in its place."""
        pods_with_label = self._pods({"batch.kubernetes.io/job-name": self._visit})
        return [pod for pod in pods_with_label if controller(pod) == self._visit_uid]

    def _pods(self, labels: dict[str, Any]) -> list[Any]:
        return self._cluster.request("list pods", lambda: list(self._cluster.client.list(Pod, labels=labels)))


def _name(pod: Any) -> str:
    return str(pod.metadata.name)


def _is_running(pod: Any) -> bool:
    return bool(pod.status and pod.status.phase == "Running" and not pod.metadata.deletionTimestamp)
