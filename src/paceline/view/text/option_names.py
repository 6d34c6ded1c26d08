"""The options and commands that errors name for users of commands; those of the client name its arguments and calls."""

from __future__ import annotations

from paceline.errors import Argument, Call, PacelineError

# Only where the names differ.
_OPTIONS = {"include_superseded": "--all", "rebuild_data": "--ingest", "until": "--for"}
_COMMANDS = {"copy_snapshot": "snapshots get", "get": "status", "runs": "ls", "submit": "run"}
_PLACEHOLDERS = {"code": "DIR", "context": "NAME", "job": "FILE", "to": "DIR"}
_POSITIONAL = {"job": "job.yaml", "run": "RUN"}  # arguments of commands that are no options


def reword(error: PacelineError) -> None:
    error.reword(where=_received, remedy=suggested)


def text_of(error: Exception) -> str:
    if isinstance(error, PacelineError):
        reword(error)
    return str(error)


def _received(part: Argument | Call) -> str:
    """
    >>> _received(Argument("since", "ten")), _received(Argument("tail", -1))
    ("--since 'ten'", '--tail -1')
    """
    if isinstance(part, Call) or part.value in (None, True):
        return suggested(part)
    return f"{_option(part)} {_text(part.value) if isinstance(part.value, float) else repr(part.value)}"


def suggested(part: Argument | Call) -> str:
    """
    >>> suggested(Argument("on", "kubernetes")), suggested(Argument("force", True)), suggested(Argument("code"))
    ('--on kubernetes', '--force', '--code DIR')
    >>> suggested(Call("stacks", "digits-1", (Argument("seconds", 10),)))
    'paceline stacks digits-1 --seconds 10'
    >>> suggested(Call("submit", arguments=(Argument("job"),)))
    'paceline run job.yaml'
    """
    if isinstance(part, Argument):
        value = _PLACEHOLDERS.get(part.name, "") if part.value is None else "" if part.value is True else part.value
        return f"{_option(part)} {_text(value)}".rstrip()
    parts = ["paceline", _COMMANDS.get(part.function, part.function), *([part.run] if part.run else [])]
    for argument in part.arguments:
        if argument.name in _POSITIONAL:
            parts.append(_POSITIONAL[argument.name] if argument.value is None else _text(argument.value))
        else:
            parts.append(suggested(argument))
    return " ".join(parts)


def _option(argument: Argument) -> str:
    return _OPTIONS.get(argument.name, f"--{argument.name}")


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
