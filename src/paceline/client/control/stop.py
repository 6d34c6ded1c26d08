"""Stops a run and waits until it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from paceline.client.reading.refreshed_folder import followed
from paceline.errors import PacelineError
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.state import events
from paceline.view.state.events import Event

PATIENCE_S = 15.0
CLUSTER_PATIENCE_S = 60.0  # a pod that is just starting ignores SIGTERM until the end of its grace period
COMMAND_REASON, API_REASON = "stopped by `paceline stop`", "stopped by Run.stop()"


def grace_of(run: Run) -> float:
    """Seconds that its tasks have to finish after SIGTERM."""
    return float(run_folders.plan(run.folder).get("limits", {}).get("grace", 30.0))


def _deliveries_of(run: Run) -> float:
    """Seconds that its captain may take to notify others after the end of the run."""
    from paceline.agent.deliveries.client import PATIENCE_S as MORE_S
    from paceline.agent.deliveries.schedule import END_S

    plan = run_folders.plan(run.folder)
    return END_S + MORE_S if plan.get("notify") or plan.get("track") else 0.0


def is_running(run: Run) -> bool:
    """Also asks the cluster: the events of a run on a cluster come from pods, which others may be able to create."""
    if run_folders.alive(run.folder) or not run_folders.on_cluster(run.folder):
        return run_folders.alive(run.folder)
    from paceline.backends.kubernetes.api.cluster import Unreachable
    from paceline.backends.kubernetes.runs import local_folder

    try:
        with closing(local_folder.reopen(run.folder)) as running:
            return local_folder.is_running(running.cluster, run.folder) and running.is_undecided()
    except Unreachable:
        if run_folders.abandoned(run.folder):
            raise  # its submission may have been interrupted after its Jobs had started
        return False
    except PacelineError:
        return False


def stop(
    run: Run, now: bool = False, on_event: Callable[[Event], None] = lambda event: None, reason: str = COMMAND_REASON
) -> bool:
    """Returns whether the run has ended. `now`: kill it without a grace period. `on_event`: called for each event.
    `reason`: for its report."""
    if run_folders.on_cluster(run.folder):
        return _stop_on_cluster(run, now, reason)
    from paceline.backends import local

    if now or not _request_stop(run, grace_of(run) + _deliveries_of(run) + PATIENCE_S, on_event, reason):
        local.kill(run.folder)
    return wait_until_ended(run.folder)


def wait_until_ended(folder: Path, limit: float = PATIENCE_S) -> bool:
    """Waits for a run that was killed."""
    deadline = time.monotonic() + limit
    while run_folders.alive(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _stop_on_cluster(run: Run, now: bool, reason: str) -> bool:
    from paceline.backends.kubernetes.runs.local_folder import reopen

    deadline = time.monotonic() + grace_of(run) + _deliveries_of(run) + CLUSTER_PATIENCE_S
    with closing(reopen(run.folder)) as running, followed(run, follow=True) as has_ended:
        if not (running.kill() if now else running.stop(reason)):
            raise PacelineError(
                f"{run.name} was not {'killed' if now else 'stopped'}: "
                "the cluster cannot be reached, or it refused the request",
                remedy="try again",
            )
        while not has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
    return True


def _request_stop(run: Run, limit: float, on_event: Callable[[Event], None], reason: str) -> bool:
    """Requests the stop in a thread, and reports events until it has a reply."""
    from paceline.backends import local

    results: list[bool | PacelineError] = []

    def stop() -> None:
        try:
            results.append(local.stop(run.folder, reason, limit))
        except PacelineError as error:
            results.append(error)

    request = threading.Thread(target=stop, daemon=True)
    with closing(events.follow(run.folder)) as tail:
        while tail.read():
            pass
        try:
            request.start()
        except RuntimeError:  # the machine currently allows no more threads
            stop()
        while request.is_alive():
            request.join(0.1)
            for event in filter(None, map(events.parse, tail.read())):
                on_event(event)
    result = results[0] if results else False
    if isinstance(result, PacelineError):
        raise result
    return result
