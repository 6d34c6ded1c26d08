"""How verbs speak: words on stderr, data on stdout, and the mistakes of a person as one kind of failure."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


class Failure(Exception):
    """Something a person can put right; the message says how. Ends the program with this exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def fail(message: str, code: int = 2) -> NoReturn:
    raise Failure(message, code)


def tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


def complain(text: str, word: str = "error") -> None:
    from paceline.view.terminal import coloured

    tell(f"\x1b[31m{word}:\x1b[0m {text}" if coloured(sys.stderr) and word == "error" else f"{word}: {text}")


def note(text: str) -> None:
    complain(text, word="note")


def print_json(data: Any) -> None:
    import json

    print(json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False), flush=True)


def _finite(data: Any) -> Any:
    """JSON has no NaN, but a loss has: it is null there."""
    if isinstance(data, float):
        return data if data - data == 0 else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, (list, tuple)) else data


def one_of(value: str, allowed: tuple[str, ...], option: str = "-o") -> str:
    """The value, if it is one that the option takes; "" stands for leaving the option out."""
    if value and value not in allowed:
        fail(f"{option} {value!r}: {option} takes {', '.join(allowed)}")
    return value


def confirm(question: str, unasked: str) -> None:
    """Goes on where a person says yes. `unasked`: what to do where there is nobody to ask."""
    if not sys.stdin.isatty():
        fail(unasked)
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        fail("nothing was deleted", 1)
