"""`paceline stop`: asks a run to end, and waits until it has."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.chosen import choose, refresh
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, RunArgument
from paceline.cli.say import tell

_PATIENCE_S = 15.0


def main(
    run: RunArgument = None,
    now: Annotated[bool, typer.Option("--now", help="End all its tasks at once, without grace.")] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Stop a run: its tasks get SIGTERM and the job's grace. Exit code 0 once nothing of it runs."""
    from paceline.view import runs, state

    found = choose(run, on, context, namespace)
    refresh(found.folder)
    if not runs.alive(found.folder):
        tell(f"{found.name} does not run: it {_outcome(state.summary(found)['status'])}")
        return 0
    if runs.on_cluster(found.folder):
        return _stop_on_cluster(found.folder, now)
    from paceline.backends import local

    if now:
        local.kill(found.folder)
    else:
        limit = _grace(found.folder) + _PATIENCE_S
        if not _ask(found.folder, found.name, limit):
            tell("it has not ended in time: ending all its tasks at once")
            local.kill(found.folder)
    ended = gone(found.folder)
    tell(f"{found.name} is stopped" if ended else f"{found.name} still runs; see: paceline status {found.name}")
    return 0 if ended else 1


def _stop_on_cluster(folder: Path, now: bool) -> int:
    from paceline.backends.kubernetes.known import reopen
    from paceline.cli.following import following

    running = reopen(folder)
    tell(f"stopping {folder.name}" + ("" if now else f": tasks have {_grace(folder):g} s"))
    until = time.monotonic() + _grace(folder) + 2 * _PATIENCE_S
    with following(folder, follow=True) as ended:
        running.kill() if now else running.stop("stopped by `paceline stop`")
        while not ended():
            if time.monotonic() > until:
                tell(f"{folder.name} still runs; see: paceline status {folder.name}")
                return 1
            time.sleep(0.1)
    tell(f"{folder.name} is stopped")
    return 0


def gone(folder: Path, limit: float = _PATIENCE_S) -> bool:
    """Waits until nothing of a run that was told to end at once is left."""
    from paceline.view import runs

    until = time.monotonic() + limit
    while runs.alive(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _outcome(status: str) -> str:
    from paceline.view.words import outcome

    return "has not started yet" if status == "starting" else outcome(status)


def _grace(folder: Path) -> float:
    from paceline.view import runs
    from paceline.view.events import number

    limits = (runs.read_object(folder / "plan.json") or {}).get("limits")
    grace = number(limits.get("grace")) if isinstance(limits, dict) else None
    return 30.0 if grace is None else grace


def _ask(folder: Path, run: str, limit: float) -> bool:
    """Asks in the background, and meanwhile says what happens."""
    from paceline.backends import local
    from paceline.view import events
    from paceline.view.words import say, span

    tell(f"stopping {run}: tasks have {span(limit - _PATIENCE_S)}")
    tail = events.follow(folder)
    while tail.read():
        pass
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(local.stop(folder, "stopped by `paceline stop`", limit)))
    asking.daemon = True
    asking.start()
    while asking.is_alive():
        asking.join(0.1)
        for event in filter(None, map(events.parse, tail.read())):
            if event.kind == "task-exited":
                tell(f"  {say(event)}")
    tail.close()
    return bool(answers and answers[0])
