"""Errors of requests, and the HTTP status of every error."""

from __future__ import annotations

from paceline.errors import PacelineError, UsageError
from paceline.view.files.run_folders import NoRun
from paceline.view.snapshots.snapshot_listing import NoSnapshot


class NotSignedIn(PacelineError):
    """The request has no valid session."""


class ForeignOrigin(PacelineError):
    """Another web page has sent the request."""


class WrongHost(PacelineError):
    """The request is for a host name that this server does not have."""


class NotFound(PacelineError):
    """There is nothing at this path."""


class WrongMethod(PacelineError):
    """The path exists, but not with this method."""


class TooLarge(PacelineError):
    """The body of the request is too large."""


class WrongType(PacelineError):
    """The body of the request is not JSON."""


class TooManyAttempts(PacelineError):
    """Too many wrong passwords."""


class Busy(PacelineError):
    """Too many requests at a time."""


class TimeLimit(PacelineError):
    """A cluster, a store or a search took too long."""


def unreadable(error: OSError) -> PacelineError:
    """A file of a run that is damaged, or that this user cannot read."""
    return PacelineError(f"cannot read a file of the run: {error.strerror or error}", where=str(error.filename or ""))


_STATUS: tuple[tuple[type[PacelineError], int], ...] = (
    (NotSignedIn, 401), (ForeignOrigin, 403), (NoRun, 404), (NoSnapshot, 404), (NotFound, 404), (WrongMethod, 405),
    (TooLarge, 413), (WrongType, 415), (WrongHost, 421), (TooManyAttempts, 429), (Busy, 503), (TimeLimit, 504),
    (UsageError, 400),
)  # fmt: skip


def status_of(error: PacelineError) -> int:
    """502 for errors that come from elsewhere: a cluster, a store, a captain."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 502)
