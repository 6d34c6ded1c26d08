"""Changes the number of hosts of a role while a run continues, and waits until the change is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.agent.net.frames import Message
from paceline.client.control.wait import Deadline
from paceline.client.diagnosis.task_requests import NoReply, ask, names_in
from paceline.client.reading.find_run import Notify, ignore
from paceline.errors import PacelineError, UsageError
from paceline.job.similar_names import did_you_mean
from paceline.plan import Plan
from paceline.view.files import run_folders
from paceline.view.files.plan_files import read_plan
from paceline.view.files.run_folders import Run
from paceline.view.text.wording import count, join

ANSWER_S = 10.0  # seconds in which a captain replies
POLL_S, CLUSTER_POLL_S = 0.2, 2.0
PATIENCE_S = 60.0  # seconds without a reply while a captain restarts


@dataclass(frozen=True)
class Progress:
    """How far a change is, as the captain sees it."""

    hosts: int  # the number of hosts that the role is to have
    joining: tuple[str, ...]  # the first of those that do not take part yet
    leaving: tuple[str, ...]  # the first of those that have not left yet

    def __str__(self) -> str:
        parts = [f"{join(self.joining)} to take part"] if self.joining else []
        parts += [f"{join(self.leaving)} to leave, once a snapshot of the group is committed"] if self.leaving else []
        return f"waiting for {', and for '.join(parts)}" if parts else "waiting for the cluster to resize the Job"


Apply = Callable[[Progress], bool]  # has the backend start or remove hosts; whether it has nothing more to do


def scale(run: Run, sizes: dict[str, int], deadline: Deadline, notify: Notify = ignore) -> None:
    """Returns once the group trains with that many hosts. `sizes`: the number of hosts, by role. UsageError: the run
    cannot have that many. WaitTimeout: the change is not complete, and continues."""
    role, hosts = check_sizes(run.name, read_plan(run.folder), sizes)
    progress = _ask(run, {"role": role, "hosts": hosts})
    last_notice, silent_since = "", 0.0
    with _backend(run, role) as apply:
        while True:
            if progress.hosts != hosts:
                changed = f"another request has changed {role} of {run.name}"
                raise PacelineError(f"{changed} to {count(progress.hosts, 'host')}")
            is_applied = apply(progress)
            if is_applied and not progress.joining and not progress.leaving:
                return
            if str(progress) != last_notice:
                last_notice = str(progress)
                notify(last_notice)
            deadline.check("been scaled", f"it is still {last_notice}")
            pause = CLUSTER_POLL_S if run_folders.on_cluster(run.folder) else POLL_S
            time.sleep(max(0.0, min(pause, deadline.remaining)))
            try:
                progress, silent_since = _ask(run, {"role": role}), 0.0
            except NoReply:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > PATIENCE_S:
                    raise


def check_sizes(run: str, plan: Plan, sizes: dict[str, int]) -> tuple[str, int]:
    """The role, and the number of hosts that it can have. UsageError: it cannot."""
    if len(sizes) != 1:
        raise UsageError("scale requires one role and its number of hosts", remedy="for example worker=4")
    (role, hosts), roles = next(iter(sizes.items())), [each.name for each in plan.roles]
    where = f"{role}={hosts}"
    if role not in roles:
        remedy = did_you_mean(role, roles) or f"its roles are {', '.join(roles)}"
        raise UsageError(f"{run} has no role {role!r}", where=where, remedy=remedy)
    elastic = plan.scalable.get(role)
    if elastic is None:
        has_pools = any(host.group for host in plan.hosts if host.role == role)
        is_worker = role == "worker" and plan.strategy != "parameter-server"
        if has_pools and is_worker:
            remedy = "its workers have several host pools: only workers with one host pool can be scaled"
        elif is_worker:
            remedy = "set roles.worker.min or roles.worker.max in the job file, and start a new run"
        else:
            remedy = "only workers can be scaled, and not in parameter-server jobs"
        raise UsageError(f"{run}: the number of {role} hosts is fixed", where=where, remedy=remedy)
    most = sum(host.role == role for host in plan.hosts)
    if type(hosts) is not int or not elastic.min <= hosts <= most:
        raise UsageError(f"role {role} of {run} can have {elastic.min} to {most} hosts", where=where)
    return role, hosts


def _ask(run: Run, fields: Message) -> Progress:
    for message in ask(run, {"type": "scale", **fields}, ANSWER_S):
        hosts: Any = message.get("hosts")
        if type(hosts) is int:
            return Progress(hosts, names_in(message, "joining"), names_in(message, "leaving"))
    raise PacelineError(f"the captain of {run.name} sent an invalid reply")


def _backend(run: Run, role: str) -> AbstractContextManager[Apply]:
    return _on_cluster(run, role) if run_folders.on_cluster(run.folder) else _here(run)


@contextmanager
def _here(run: Run) -> Iterator[Apply]:
    from paceline.backends.local.scale_request import start_hosts

    def apply(progress: Progress) -> bool:
        if progress.joining:
            start_hosts(run.folder)
        return True

    yield apply


@contextmanager
def _on_cluster(run: Run, role: str) -> Iterator[Apply]:
    from paceline.backends.kubernetes.runs.job_size import resize
    from paceline.backends.kubernetes.runs.local_folder import reopen

    with closing(reopen(run.folder)) as running:
        yield lambda progress: resize(running.cluster, run.name, role, progress.hosts, not progress.leaving)
