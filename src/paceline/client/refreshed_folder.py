"""Keeps the folder of a run up to date while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.client.find import Notify, ignore, refresh
from paceline.view import run_folders


@contextmanager
def followed(
    folder: Path, follow: bool, hosts: Iterable[str] = (), notify: Notify = ignore
) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether the run has ended. `hosts`: whose output to fetch if not following."""
    refresh(folder, hosts, notify)
    if not follow or not run_folders.on_cluster(folder) or not run_folders.alive(folder):
        yield lambda: not run_folders.alive(folder)
        return
    from paceline.backends.kubernetes.runs import local_folder

    with local_folder.followed(folder) as running:
        if running is None:  # another process already follows it
            yield lambda: not run_folders.alive(folder)
        else:
            yield lambda: running.ended(0.0)
