"""Readers of a run (`logs -f`, `events -f`, `stop`): its folder is brought up to date while they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.cli.chosen import refresh


@contextmanager
def following(folder: Path, follow: bool, hosts: Iterable[str] = ()) -> Iterator[Callable[[], bool]]:
    """Yields a question: has the run ended? `hosts`: those whose output is wanted, where it is fetched once."""
    from paceline.view import runs

    refresh(folder, hosts)
    if not follow or not runs.on_cluster(folder) or not runs.alive(folder):
        yield lambda: not runs.alive(folder)
        return
    from paceline.backends.kubernetes.known import followed

    with followed(folder) as running:
        if running is None:  # another process does
            yield lambda: not runs.alive(folder)
        else:
            yield lambda: running.ended(0.0)
