"""The events of a run, as they are recorded, until it ends or a time limit passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from paceline.client.control.wait import Deadline
from paceline.client.reading.find_run import Notify, ignore
from paceline.client.reading.refreshed_folder import followed
from paceline.view.files.run_folders import Run
from paceline.view.state.events import Event, EventFile

_POLL_S = 0.15


def read(
    run: Run, follow: bool = False, deadline: Deadline | None = None, notify: Notify = ignore
) -> Iterator[list[tuple[Event, bytes]]]:
    """Yields events with their lines, oldest first, as often as there are new ones. `follow`: until the run ends.

    WaitTimeout: the deadline has passed. `notify`: called at the end if events are missing.
    """
    deadline = deadline or Deadline(run.name)
    with (
        closing(EventFile(run.folder, old=True)) as file,
        followed(run, follow, notify=notify, until=deadline.until) as has_ended,
    ):
        while True:
            is_last = not follow or has_ended()
            while new := file.read():
                yield new
            if is_last:
                break
            deadline.check("ended")
            time.sleep(_POLL_S)
        if file.problem:
            notify(file.problem)
