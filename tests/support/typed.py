"""What a person types as `paceline ...`, read by the command line itself, which then does nothing."""

from __future__ import annotations

import shlex
from typing import Any

from paceline.cli.app import VERBS
from paceline.cli.verb import load


def read(words: str) -> dict[str, Any]:
    """The parameters of the verb, by name; a verb or an option that there is not is an error."""
    program, verb, *rest = shlex.split(words)
    assert program == "paceline" and verb in VERBS, f"there is no verb {verb}"
    command = load(verb, VERBS[verb])
    if below := getattr(command, "verbs", {}):
        verb, *rest = rest
        assert verb in below, f"there is no verb {verb}"
        command = command.get_command(None, verb)
    with command.make_context(verb, rest) as context:
        found: dict[str, Any] = context.params
    return found


def options() -> set[str]:
    """Of all verbs."""
    commands = [load(verb, short) for verb, short in VERBS.items()]
    commands += [each.get_command(None, verb) for each in commands for verb in getattr(each, "verbs", {})]
    return {option for command in commands for each in command.params for option in each.opts}
