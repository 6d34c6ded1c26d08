"""Parses `paceline ...` commands as the command line does, without running them."""

from __future__ import annotations

import shlex
from typing import Any

from paceline.cli.app import VERBS
from paceline.cli.typer_commands import load


def read(command_line: str) -> dict[str, Any]:
    """The parameters of the verb, by name; an unknown verb or option is an error."""
    program, verb, *arguments = shlex.split(command_line)
    assert program == "paceline" and verb in VERBS, f"there is no verb {verb}"
    command = load(verb, VERBS[verb])
    if subcommands := getattr(command, "verbs", {}):
        verb, *arguments = arguments
        assert verb in subcommands, f"there is no verb {verb}"
        command = command.get_command(None, verb)
    with command.make_context(verb, arguments) as context:
        parameters: dict[str, Any] = context.params
    return parameters


def options() -> set[str]:
    """The options of all verbs."""
    commands = [load(verb, summary) for verb, summary in VERBS.items()]
    commands += [each.get_command(None, verb) for each in commands for verb in getattr(each, "verbs", {})]
    return {option for command in commands for each in command.params for option in each.opts}
