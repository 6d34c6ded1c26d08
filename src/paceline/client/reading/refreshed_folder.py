"""Keeps the folder of a run up to date while it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.client.reading.find_run import Notify, ignore, refresh
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run

if TYPE_CHECKING:
    from paceline.backends.kubernetes.runs.running import Running


@contextmanager
def followed(
    run: Run, follow: bool, hosts: Iterable[str] = (), notify: Notify = ignore, until: float = math.inf
) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether the run has ended. `hosts`: whose output to fetch if not following.
    `until`: a time of time.monotonic(), at which all requests to a cluster end."""
    folder = run.folder
    refresh(run, hosts, notify, until)
    if not follow or not run_folders.on_cluster(folder) or not run_folders.alive(folder):
        # In this order: a run that is no longer starting has a supervisor, unless it has ended.
        yield lambda: not run_folders.is_starting(folder) and not run_folders.alive(folder)
        return
    with ExitStack() as stack:
        running = _try_to_follow(folder, stack, until)

        def has_ended() -> bool:
            nonlocal running
            if running is None and run_folders.alive(folder):
                running = _try_to_follow(folder, stack, until)  # the process that followed the run may have exited
            return running.ended(0.0) if running is not None else not run_folders.alive(folder)

        yield has_ended


def _try_to_follow(folder: Path, stack: ExitStack, until: float) -> Running | None:
    """Updates the folder until the stack is closed; None: another process does that."""
    from paceline.backends.kubernetes.runs import local_folder

    with ExitStack() as attempt:
        running = attempt.enter_context(local_folder.followed(folder, until))
        if running is not None:
            stack.enter_context(attempt.pop_all())
        return running
