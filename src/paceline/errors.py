"""Errors for the user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from typing import Any

FAILED, USAGE = 1, 2  # exit codes of the command line


class PacelineError(Exception):
    """The client raises it; the command line prints it on one line, or its fields with `-o json`."""

    exit_code = FAILED

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.remedy}" if self.remedy else text

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "what": self.what, "where": self.where, "remedy": self.remedy}


class UsageError(PacelineError):
    """Invalid options or arguments, or an invalid combination of them."""

    exit_code = USAGE


def is_out_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started: a limit of processes or of memory is reached."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)
