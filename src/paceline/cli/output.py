"""How commands print: messages to stderr, data to stdout; wrong usage raises UsageError."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import USAGE, PacelineError, UsageError
from paceline.view.text.option_names import reword


def fail(message: str, code: int = USAGE, *, where: str = "", remedy: str = "") -> NoReturn:
    kind = UsageError if code == USAGE else PacelineError
    raise kind(message, where=where, remedy=remedy)


def tell(text: str | PacelineError) -> None:
    try:
        print(text_of(text) if isinstance(text, PacelineError) else text, file=sys.stderr, flush=True)
    except OSError:
        pass


def text_of(error: PacelineError) -> str:
    """The error with the options and commands that it suggests."""
    reword(error)
    return str(error)


def print_error(error: str | PacelineError, label: str = "error") -> None:
    from paceline.view.text.terminal import colored

    text = text_of(error) if isinstance(error, PacelineError) else error
    red = label == "error" and colored(sys.stderr)
    tell(f"\x1b[31m{label}:\x1b[0m {text}" if red else f"{label}: {text}")


def note(text: str | PacelineError) -> None:
    print_error(text, label="note")


def print_json(data: Any) -> None:
    import json

    from paceline.client.json_form import finite

    print(json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False), flush=True)


def expanded(path: str) -> Path:
    """The path that the user gave, absolute. `~` stays as it is for a user without a home folder."""
    import os

    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def one_of(value: str, allowed: tuple[str, ...], option: str = "-o") -> str:
    """Returns the value if the option accepts it; "" means that the option was omitted."""
    if value and value not in allowed:
        remedy = f"use one of {', '.join(allowed)}" if len(allowed) > 1 else f"use {allowed[0]}"
        fail("invalid value", where=f"{option} {value!r}", remedy=remedy)
    return value


def confirm(question: str, remedy: str) -> None:
    """Returns if the user answers yes. `remedy`: what to do when stdin is not a terminal."""
    if not sys.stdin.isatty():
        fail("cannot ask for confirmation: standard input is not a terminal", remedy=remedy)
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        fail("nothing was deleted", 1)
