"""Snapshots inside a cluster: read by a program in the captain's pod, or in a short-lived one that has the claim."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightkube import codecs
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod
from lightkube.types import CascadeType

from paceline import plan as plans
from paceline.backends.kubernetes import names, pods, reasons, render
from paceline.backends.kubernetes.archive import agent_archive
from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable, connect
from paceline.backends.kubernetes.known import goes_on
from paceline.backends.kubernetes.program import Program
from paceline.plan import CAPTAIN
from paceline.view import runs
from paceline.view.places import NoClaim, OutOfReach, in_claim

START_S = 600.0  # until a pod with the claim runs: its image may be large, its volume on another node
QUIET_S = 5.0  # until a person is told why it does not run yet
LOOK_S = 0.5

# The pod's own agent may be of another version, or gone with the run: what is run there comes by its standard input.
_BEGIN = """
import os, sys, tempfile
length, place, run = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with tempfile.NamedTemporaryFile(suffix=".pyz") as file:
    while length:
        data = os.read(0, length)
        if not data:
            sys.exit(1)
        file.write(data)
        length -= len(data)
    file.flush()
    sys.path.insert(0, file.name)
    from paceline.storage.serving import main
main(place, run)
"""
_NO_PYTHON = "there is no Python 3.9 or newer in its image"


def command(place: str, run: str, length: int) -> list[str]:
    """`length`: of the archive that comes first."""
    script = f'{pods.EXEC_PYTHON} -I -c "$@"; done; echo "{_NO_PYTHON}" >&2; exit 1'
    return ["/bin/sh", "-c", script, "sh", _BEGIN, str(length), place, run]


class Reach:
    """To the place of one run; nothing is asked of the cluster before the first dial."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        """`folder`: where this machine keeps the run. `note`: told why it takes its time."""
        self._folder, self._run, self._note = folder, folder.name, note
        self._visit = ""  # the Job of a pod with the claim
        self._known: Cluster | None = None

    def dial(self) -> Program:
        if not in_claim(runs.Run(self._run, self._folder)) and not runs.alive(self._folder):
            raise OutOfReach(
                f"the snapshots of {self._run} were in its captain's pod, and went with it; those in a volume claim or "
                "at a bucket stay (snapshots.to: claim://name/path, s3://, gs:// or az://)"
            )
        pod, container = self._captain(), CAPTAIN
        if not pod and goes_on(self._cluster, self._folder):
            raise OutOfReach(f"the captain of {self._run}, which has its snapshots, does not run now: try again")
        plan = plans.from_data(json.loads((self._folder / "plan.json").read_text()))
        if not pod:
            pod, container = self._visited(plan), pods.VISIT
        archive = agent_archive()
        program = Program(self._cluster, pod, container, command(pods.place(plan), self._run, len(archive)))
        program.sendall(archive)
        return program

    def close(self) -> None:
        """Nothing of it is left on the cluster."""
        if self._visit:
            job, self._visit = self._visit, ""
            delete = partial(self._cluster.client.delete, Job, job, cascade=CascadeType.BACKGROUND)
            with suppress(Refused, Unreachable):  # it goes by itself, a little later
                self._cluster.ask(f"delete the Job {job}", delete)

    @property
    def _cluster(self) -> Cluster:
        if self._known is None:
            info = runs.info(self._folder)
            self._known = connect(info["context"], info["namespace"])
        return self._known

    def _captain(self) -> str:
        """The pod of the captain that runs; empty: there is none."""
        labels: dict[str, Any] = {names.RUN_LABEL: self._run, names.ROLE_LABEL: CAPTAIN}
        if uid := runs.info(self._folder).get("uid"):
            labels["batch.kubernetes.io/controller-uid"] = str(uid)
        return next((_name(pod) for pod in self._pods(labels) if _runs(pod)), "")

    def _visited(self, plan: plans.Plan) -> str:
        """A pod with the claim, made where there is none yet."""
        if self._visit and not any(map(_runs, self._pods_of_visit())):
            self.close()  # nobody has asked it anything for so long that it has ended
        if not self._visit:
            made = render.visit(plan, self._run, f"paceline-visit-{secrets.token_hex(4)}")
            self._visit = str(made["metadata"]["name"])
            create = partial(self._cluster.client.create, codecs.from_dict(made))
            self._cluster.ask(f"create the Job {self._visit}, whose pod looks into {plan.snapshots.to}", create)
        begun, told, seen = time.monotonic(), "", False
        while True:
            found = self._pods_of_visit()
            if running := next(filter(_runs, found), None):
                return _name(running)
            waited = time.monotonic() - begun
            why = self._why(found, plan, waited > QUIET_S)
            seen = seen or bool(found)
            if waited > START_S or (seen and not found):
                raise OutOfReach(f"the pod that should look into {plan.snapshots.to} did not run: {told or why}")
            if waited > QUIET_S and why != told:
                told = why
                self._note(f"waiting for a pod that looks into {plan.snapshots.to}: {why}")
            time.sleep(LOOK_S)

    def _why(self, found: list[Any], plan: plans.Plan, thoroughly: bool) -> str:
        """Why no pod of the visit runs. OutOfReach: none will."""
        told = [reasons.of_pod(pod.to_dict(), pods.VISIT) for pod in found]
        if thoroughly:
            told += [each for name in (self._visit, *map(_name, found)) for each in self._events(name)]
        for reason in filter(None, told):
            if reason.cause == "missing" and "PersistentVolumeClaim" in reason.text:
                claim = plan.snapshots.claimed[0]
                raise NoClaim(f"there is no volume claim {claim} in {self._cluster.namespace} any more")
            if reason.final:
                raise OutOfReach(f"no pod can look into {plan.snapshots.to}: {reason.text}")
            return reason.text
        return "it is on its way"

    def _events(self, name: str) -> list[reasons.Reason | None]:
        """Of the Job or of its pod. Seeing them is a right that a person may lack."""
        fields: dict[str, Any] = {"involvedObject.name": name}
        try:
            found = self._cluster.ask("list events", lambda: list(self._cluster.client.list(Event, fields=fields)))
        except Refused:
            return []
        events = [each.to_dict() for each in found]
        return [reasons.of_job(each, pods.VISIT) or reasons.of_mount(each, pods.VISIT) for each in events]

    def _pods_of_visit(self) -> list[Any]:
        return self._pods({"batch.kubernetes.io/job-name": self._visit})

    def _pods(self, labels: dict[str, Any]) -> list[Any]:
        return self._cluster.ask("list pods", lambda: list(self._cluster.client.list(Pod, labels=labels)))


def _name(pod: Any) -> str:
    return str(pod.metadata.name)


def _runs(pod: Any) -> bool:
    return bool(pod.status and pod.status.phase == "Running" and not pod.metadata.deletionTimestamp)
