"""What is wrong with a job file: problems with their place, and the text a person reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHOWN = 100  # characters of a source line, or of a value, that are repeated to the person
MOST = 50  # problems shown at once


@dataclass(frozen=True)
class Problem:
    """One mistake. `line` and `column` count from 1; both are None where there is no text to point at."""

    file: str
    line: int | None
    column: int | None
    path: str
    message: str
    allowed: str | None = None
    hint: str | None = None
    snippet: str | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        text = f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"
        if self.hint:
            text += f"; {self.hint}"
        if self.allowed:
            text += f"{' ' if text.endswith('?') else '; '}allowed: {self.allowed}"
        return f"{_harmless(text)}\n    {_harmless(self.snippet)}" if self.snippet else _harmless(text)


class JobError(Exception):
    """A job that cannot be run as written. `str()` is the complete text for a person."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        shown = [str(problem) for problem in self.problems[:MOST]]
        if len(self.problems) > MOST:
            shown.append(f"and {len(self.problems) - MOST} more problems")
        return "\n".join(shown)


@dataclass(frozen=True)
class Finding:
    """A mistake found in the data, before its place in the text is looked up."""

    path: tuple[str | int, ...]
    message: str
    hint: str | None = None
    allowed: str | None = None
    at_key: bool = False  # the key itself is wrong, not what it holds


class BadValueError(ValueError):
    """A value that a field does not take. `{text}` in the hint stands for the value as written.

    `inside` leads from the field to what is wrong, where that is deeper in a value that is read as a whole.
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


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that the word was most probably meant to be, if any is near.

    >>> nearest("replics", ["replicas", "gpus"])
    'replicas'
    >>> nearest("Worker_", ["worker", "chief"])
    'worker'
    >>> nearest("zebra", ["worker", "chief"]) is None
    True
    """
    by_folded = {name.lower().replace("_", "-"): name for name in names}
    folded = word[:SHOWN].lower().replace("_", "-")
    found = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.66)
    return by_folded[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    name = nearest(word, names)
    return None if name is None else f'did you mean "{name}"?'


def listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def visible(text: str, most: int = SHOWN) -> str:
    """The text on one line, shortened, without characters that would act on a terminal."""
    short = text if len(text) <= most else text[: most - 3] + "..."
    return _harmless(short)


def _harmless(text: str) -> str:
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    return char if char.isprintable() else "\\t" if char == "\t" else f"\\u{ord(char):04x}"


def described(value: object) -> str:
    """A value as a person would name it: the text "x", the number 3, a list."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the text "{visible(value, 60)}"'
    if isinstance(value, int | float):
        return f"the number {visible(repr(value), 40)}"
    return "a list" if isinstance(value, list) else "a mapping"
