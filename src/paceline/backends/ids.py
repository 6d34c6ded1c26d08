"""What runs are called, here and on a cluster alike."""

from __future__ import annotations

import re
import secrets

_RUN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LETTERS = "0123456789bcdfghjkmnpqrstvwxz"  # no words come of them
_MADE_UP = 6  # of them: 10,000 runs of one job at one bucket hardly ever meet
LONGEST_RUN = 45  # with the longest role, group and index behind it, it is still a DNS label


class BadRunId(Exception):
    """The id that a person wants cannot be a run's; the text says why."""


def new_run(job: str, wanted: str | None = None) -> str:
    made_up = (secrets.choice(_LETTERS) for _ in range(min(_MADE_UP, LONGEST_RUN - len(job) - 1)))
    run = wanted or f"{job}-{''.join(made_up)}"
    if len(run) > LONGEST_RUN or not _RUN.fullmatch(run):
        raise BadRunId(
            f"{run!r} cannot be a run's id: a letter, then letters, digits and -, all lower case, at most "
            f"{LONGEST_RUN} characters"
        )
    return run
