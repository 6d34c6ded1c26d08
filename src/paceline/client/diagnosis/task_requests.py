"""Requests about the tasks of a run that its captain answers: which tasks are meant, and the replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.task_request import REFUSED, UNKNOWN, end_type
from paceline.client.control.stop import is_running
from paceline.errors import Call, PacelineError, UsageError
from paceline.job.similar_names import did_you_mean
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.state import status_reader

# The captain of another user's run may send anything.
LONGEST_REASON = 1000  # characters
_MOST_NAMES, _LONGEST_NAME = 20, 255  # of hosts that are shown; characters


# By kind of request: what an older version cannot do.
_ACTIONS = {
    "stacks": "show what tasks are doing",
    "profile": "profile tasks",
    "scale": "change the number of hosts",
    "pause": "pause and resume runs",
    "resume": "pause and resume runs",
}


class NoReply(PacelineError):
    """The captain is restarting, or its cluster cannot be reached now."""


class OlderCaptain(NoReply):
    """The captain does not know this kind of request."""


def ask(run: Run, request: Message, seconds: float) -> Iterator[Message]:
    """The replies of members, which may be incomplete. `seconds`: how long the captain may take. PacelineError: the run
    is not running, or its captain refuses the request or does not reply."""
    if not is_running(run):
        raise PacelineError(f"{run.name} is not running", remedy=("see: ", Call("status", run.name)))
    has_reply = False
    try:
        for message in _messages(run, request, seconds):
            if message["type"] == REFUSED:
                reason = str(message.get("reason"))[:LONGEST_REASON]
                raise PacelineError(f"{run.name}: the request was refused: {reason}")
            if message["type"] == UNKNOWN:
                raise _too_old(run, request)
            has_reply = True
            if message["type"] != end_type(request):
                yield message
    except WireError as error:
        raise PacelineError(f"the captain of {run.name} sent an invalid reply: {error}") from None
    if not has_reply:
        raise NoReply(f"the captain of {run.name} did not reply", remedy="it may be restarting: try again")


def _too_old(run: Run, request: Message) -> OlderCaptain:
    what = f"{run.name} was started by an older version of Paceline, which cannot {_ACTIONS[request['type']]}"
    remedy = ("stop it with `", Call("stop", run.name), "` and start a new run from its snapshots (snapshots.from)")
    return OlderCaptain(what, remedy=remedy)


def names_in(message: Message, field: str) -> tuple[str, ...]:
    """The names of hosts in a reply."""
    names: Any = message.get(field)
    return tuple(str(name)[:_LONGEST_NAME] for name in names[:_MOST_NAMES]) if isinstance(names, list) else ()


def wanted_tasks(run: Run, names: Sequence[str]) -> list[str]:
    """Those of the tasks of a plan that are to run: not those that `scale` could add or has removed."""
    if not run_folders.plan(run.folder).get("elastic"):
        return list(names)
    state = status_reader.read(run).state
    return [name for name in names if state.is_wanted(name)] or list(names)  # its events may not be here yet


def select(wanted: Sequence[str], names: Sequence[str], run: str) -> list[str]:
    """Those of the names that are wanted, as tasks or as their roles; without any: all."""
    for each in wanted:
        if not any(each in (name, name.rpartition("-")[0]) for name in names):
            remedy = did_you_mean(each, names) or f"its tasks are {', '.join(names[:20])}"
            raise UsageError(f"{run} has no task {each!r}", remedy=remedy)
    return [name for name in names if not wanted or name in wanted or name.rpartition("-")[0] in wanted]


def _messages(run: Run, request: Message, seconds: float) -> Iterator[Message]:
    if run_folders.on_cluster(run.folder):
        from paceline.backends.kubernetes.api.cluster import Unreachable
        from paceline.backends.kubernetes.runs.task_request import ask_captain as ask_on_cluster

        try:
            yield from ask_on_cluster(run.folder, request, seconds)
        except Unreachable as error:
            raise NoReply(error.what, remedy=error.remedy_text) from error
        return
    from paceline.backends.local.task_request import ask_captain

    yield from ask_captain(run.folder, request, seconds)
