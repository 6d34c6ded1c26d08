"""Opens the run that `status`, `logs` or `events` reads, and keeps it up to date in the meantime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from paceline.cli.output import fail, note

if TYPE_CHECKING:
    from paceline.view.files.run_folders import Run


def readable(
    run: str | None, on: str, context: str | None, namespace: str | None, endpoint: str, follow: bool = False
) -> Run:
    """`run`: an id, or the location of the run's snapshots. Files fetched from there are deleted at exit."""
    import atexit
    import signal
    from contextlib import ExitStack

    from paceline.client.reading.find_run import Target, readable_run
    from paceline.view.snapshots.snapshot_locations import is_location

    if run is not None and is_location(run):
        if follow:
            fail("--follow requires a run id, not a location", where=run)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # being killed by it would leave the fetched files behind
    fetched = ExitStack()
    atexit.register(fetched.close)
    return fetched.enter_context(readable_run(run, Target(on, context, namespace, endpoint=endpoint), note))


def followed(run: Run, follow: bool, hosts: Iterable[str] = ()) -> AbstractContextManager[Callable[[], bool]]:
    from paceline.client.reading import refreshed_folder

    return refreshed_folder.followed(run, follow, hosts, note)
