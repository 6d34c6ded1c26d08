"""Requests about the tasks of a run that its captain answers: which tasks are meant, and the replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.task_request import REFUSED, end_type
from paceline.client.stop import is_running
from paceline.errors import PacelineError, UsageError
from paceline.job.similar_names import did_you_mean
from paceline.view import run_folders
from paceline.view.run_folders import Run


def ask(run: Run, request: Message, seconds: float) -> Iterator[Message]:
    """The replies of members, which may be incomplete. `seconds`: how long the captain may take. PacelineError: the run
    is not running, or its captain refuses the request or does not reply."""
    if not is_running(run):
        raise PacelineError(f"{run.name} is not running", remedy=f"see: paceline status {run.name}")
    has_reply = False
    try:
        for message in _messages(run, request, seconds):
            if message["type"] == REFUSED:
                raise PacelineError(f"the captain of {run.name} refused: {message.get('reason')}")
            has_reply = True
            if message["type"] != end_type(request):
                yield message
    except WireError as error:
        raise PacelineError(f"the captain of {run.name} sent an invalid reply: {error}") from None
    if not has_reply:
        remedy = "try again; a run that an earlier version of Paceline started cannot reply"
        raise PacelineError(f"the captain of {run.name} did not reply", remedy=remedy)


def select(wanted: Sequence[str], names: Sequence[str], run: str) -> list[str]:
    """Those of the names that are wanted, as tasks or as their roles; without any: all."""
    for each in wanted:
        if not any(each in (name, name.rpartition("-")[0]) for name in names):
            remedy = did_you_mean(each, names) or f"its tasks are {', '.join(names[:20])}"
            raise UsageError(f"{run} has no task {each!r}", remedy=remedy)
    return [name for name in names if not wanted or name in wanted or name.rpartition("-")[0] in wanted]


def _messages(run: Run, request: Message, seconds: float) -> Iterator[Message]:
    if run_folders.on_cluster(run.folder):
        from paceline.backends.kubernetes.runs.task_request import ask_captain as ask_on_cluster

        return ask_on_cluster(run.folder, request, seconds)
    from paceline.backends.local.task_request import ask_captain

    return ask_captain(run.folder, request, seconds)
