"""Sends a request about tasks to the captain of a run on a cluster, with a program in the captain's pod."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from paceline.agent.net import task_request
from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.task_request import REFUSED, UNKNOWN, end_type
from paceline.backends.kubernetes.api.pod_exec import Program
from paceline.backends.kubernetes.objects import names, pods
from paceline.backends.kubernetes.runs.local_folder import reopen
from paceline.plan import CAPTAIN
from paceline.storage.json_values import parse_json

LONGEST_LINE = 16 * 1024 * 1024  # bytes
MOST_BYTES = 1024 * 1024 * 1024  # of all replies
START_S = 20.0  # seconds in which the program has to start and end, besides its own limits


def ask_captain(folder: Path, request: Message, seconds: float) -> Iterator[Message]:
    """As agent.net.task_request does. Refused, Unreachable: the program cannot be started."""
    with closing(reopen(folder)) as running:
        captain = running.captain_pod()
        if not captain:
            return
        with closing(Program(running.cluster, captain, CAPTAIN, command(request, seconds))) as program:
            try:
                for line in _lines(program, time.monotonic() + START_S + seconds):
                    message = _message(line)
                    yield message
                    if message["type"] in (end_type(request), REFUSED, UNKNOWN):
                        return
            except _NoModule:  # the agent is of an older version
                yield {"type": UNKNOWN}


class _NoModule(Exception):
    """The captain's pod has no such program."""


def command(request: Message, seconds: float) -> list[str]:
    """Runs in the captain's pod, whose agent may lack that module if it is of another version."""
    script = (
        f"export PYTHONPATH={pods.AGENT}:{pods.AGENT_FOLDER}/agent.pyz; "
        f'{pods.EXEC_PYTHON} -m {task_request.__name__} "$@"; done'
    )
    options = json.dumps({"request": request, "seconds": seconds})
    return ["/bin/sh", "-c", script, "sh", f"127.0.0.1:{names.CAPTAIN_PORT}", pods.TLS_FOLDER, CAPTAIN, options]


def _lines(program: Program, deadline: float) -> Iterator[bytes]:
    """Until the program has ended, or the deadline has passed."""
    unread, buffer = b"", bytearray(65536)
    view, size = memoryview(buffer), 0
    while (remaining := deadline - time.monotonic()) > 0:
        program.settimeout(remaining)
        try:
            count = program.recv_into(view, len(buffer))
        except OSError as error:  # it has ended, or is silent until the deadline
            if f"No module named {task_request.__name__}" in str(error):
                raise _NoModule from None
            return
        size += count
        *complete, unread = (unread + bytes(view[:count])).split(b"\n")
        yield from complete
        if len(unread) > LONGEST_LINE or size > MOST_BYTES:
            raise WireError("a reply is too long")


def _message(line: bytes) -> Message:
    """Whoever may create pods may have written it."""
    try:
        message = parse_json(line)
    except ValueError:
        raise WireError("not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("not a message")
    return message
