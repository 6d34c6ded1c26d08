"""What runs are called, here and on a cluster alike."""

from __future__ import annotations

import re
import secrets

_RUN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST_RUN = 45  # with the longest role, group and index behind it, it is still a DNS label


class BadRunId(Exception):
    """The id that a person wants cannot be a run's; the text says why."""


def new_run(job: str, wanted: str | None = None) -> str:
    run = wanted or f"{job}-{secrets.token_hex(2)}"
    if len(run) > LONGEST_RUN or not _RUN.fullmatch(run):
        raise BadRunId(
            f"{run!r} cannot be a run's id: a letter, then letters, digits and -, all lower case, at most "
            f"{LONGEST_RUN} characters"
        )
    return run
