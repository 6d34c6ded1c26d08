"""Errors for the user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Union

FAILED, USAGE = 1, 2  # exit codes of the command line
SCHEMA_VERSION = 1  # of all JSON; increased when a key is removed or its meaning changes; new keys may be added anytime


@dataclass(frozen=True)
class Argument:
    """An argument of the Python API, for which the command line has an option. Without a value: any."""

    name: str
    value: Any = None

    def __str__(self) -> str:
        return f"{self.name}={'...' if self.value is None else repr(self.value)}"


@dataclass(frozen=True)
class Call:
    """A call of the Python API, for which the command line has a command."""

    function: str  # of `paceline.client`; with `run`: a method of that run
    run: str = ""
    arguments: tuple[Argument, ...] = ()

    def __str__(self) -> str:
        prefix = f"client.get({self.run!r})" if self.run else "client"
        return f"{prefix}.{self.function}({', '.join(map(str, self.arguments))})"


# A text that may contain arguments and calls.
Text = Union[str, Argument, Call, "tuple[str | Argument | Call, ...]"]


class PacelineError(Exception):
    """The base class of all errors of the client. The command line prints such an error on one line, or its fields with
    `-o json`.

    `where` and `remedy` name arguments and functions of the Python API; on the command line, options and commands.
    """

    exit_code = FAILED

    def __init__(self, what: str, *, where: Text = "", remedy: Text = "") -> None:
        super().__init__(what)
        self.what, self.where_text, self.remedy_text = what, where, remedy
        self.reword(str, str)

    def reword(self, where: Callable[[Argument | Call], str], remedy: Callable[[Argument | Call], str]) -> None:
        """Sets `where` and `remedy`, with arguments and calls as these functions name them."""
        self.where, self.remedy = _worded(self.where_text, where), _worded(self.remedy_text, remedy)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.remedy}" if self.remedy else text

    def after(self, text: str) -> PacelineError:
        """An error that begins with this text, and continues with this error."""
        what = f"{self.where}: {self.what}" if self.where else self.what
        return PacelineError(f"{text}: {what}", remedy=self.remedy_text)

    def fields(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "what": self.what, "where": self.where, "remedy": self.remedy}

    def to_dict(self) -> dict[str, Any]:
        """What the command line prints with `-o json`, where `where` and `remedy` name its options and commands."""
        return {"schema_version": SCHEMA_VERSION, "error": self.fields()}


class UsageError(PacelineError):
    """Invalid options or arguments, or an invalid combination of them."""

    exit_code = USAGE


def parts_of(text: Text) -> tuple[str | Argument | Call, ...]:
    return text if isinstance(text, tuple) else (text,) if text else ()


def _worded(text: Text, name: Callable[[Argument | Call], str]) -> str:
    return "".join(each if isinstance(each, str) else name(each) for each in parts_of(text))


def is_out_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started: a limit of processes or of memory is reached."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)
