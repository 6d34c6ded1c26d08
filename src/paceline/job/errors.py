"""Problems in job files: their position, and the text that the user reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import SCHEMA_VERSION, USAGE, PacelineError

MAX_QUOTED = 100  # characters of a source line, or of a value, that a message quotes
MAX_REPORTED = 50  # problems in one message
OVERRIDE = "--set "  # begins `Problem.file` if the problem is in an override


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    file: str
    """The job file, or an override, such as `--set gpus=-1`."""
    line: int | None
    """Where the mistake is, counted from 1; None: there is no text to point at."""
    column: int | None
    """Likewise, the column in this line."""
    path: str
    """The field, such as `roles.worker.gpus`; empty: the job as a whole."""
    message: str
    """What is wrong with it."""
    allowed: str | None = None
    """The values that are allowed."""
    hint: str | None = None
    """What to do, such as the name that was probably meant."""
    snippet: str | None = None
    """The line of the job file."""

    def to_dict(self) -> dict[str, Any]:
        """An item of `problems` of `paceline validate -o json`, with a `schema_version`."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @property
    def is_in_override(self) -> bool:
        """Whether the mistake is in an override of the job file, not in the file."""
        return self.file.startswith(OVERRIDE)

    @property
    def position(self) -> str:
        """The file and the line, such as `job.yaml:7`."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def what(self) -> str:
        """The field, and what is wrong with it."""
        return f"{self.path}: {self.message}" if self.path else self.message

    @property
    def remedy(self) -> str:
        """What to do, and the values that are allowed; empty: nothing is known."""
        return "; ".join(filter(None, [self.hint, self.allowed and f"allowed: {self.allowed}"]))

    def __str__(self) -> str:
        text = f"{self.position}: {self.what}"
        if self.hint:
            text += f"; {self.hint}"
        if self.allowed:
            text += f"{' ' if text.endswith('?') else '; '}allowed: {self.allowed}"
        return f"{_escape(text)}\n    {_escape(self.snippet)}" if self.snippet else _escape(text)


class JobError(PacelineError):
    """A job file with problems. `str()` is the complete message for the user."""

    exit_code = USAGE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = list(problems)
        messages = [str(problem) for problem in self.problems[:MAX_REPORTED]]
        if len(self.problems) > MAX_REPORTED:
            messages.append(f"and {len(self.problems) - MAX_REPORTED} more problems")
        super().__init__("\n".join(messages))

    def fields(self) -> dict[str, Any]:
        """With one problem, `what`, `where` and `remedy` are its own; with several, each has them in `problems`."""
        fields = super().fields()
        if len(self.problems) == 1:
            only = self.problems[0]
            fields.update(what=only.what, where=only.position, remedy=only.remedy)
        elif self.problems:
            fields.update(where=self.problems[0].file, remedy="correct each of the problems")
        return {**fields, "problems": [asdict(problem) for problem in self.problems]}


@dataclass(frozen=True)
class Finding:
    """A mistake in the data, whose line and column are not known yet."""

    path: tuple[str | int, ...]
    message: str
    hint: str | None = None
    allowed: str | None = None
    at_key: bool = False  # the key itself is wrong, not its value


class BadValueError(ValueError):
    """A value that a field does not accept. `{text}` in the hint is replaced by the value as written.

    `inside` is the path from the field to the wrong part, if the field is read as one nested value.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        allowed: str | None = None,
        inside: tuple[str | int, ...] = (),
        at_key: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.allowed = allowed
        self.inside = inside
        self.at_key = at_key


def join_names(names: Sequence[str]) -> str:
    return ", ".join(names)


def visible(text: str, max_length: int = MAX_QUOTED) -> str:
    """The text shortened, on one line, and with control characters escaped."""
    short = text if len(text) <= max_length else text[: max_length - 3] + "..."
    return _escape(short)


def _escape(text: str) -> str:
    return text if text.isprintable() else "".join(map(_escape_char, text))


def _escape_char(char: str) -> str:
    return char if char.isprintable() else "\\t" if char == "\t" else f"\\u{ord(char):04x}"


def describe(value: object) -> str:
    """A description of a value: the string "x", the number 3, a list."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the string "{visible(value, 60)}"'
    if isinstance(value, int | float):
        return f"the number {visible(repr(value), 40)}"
    return "a list" if isinstance(value, list) else "a mapping"
