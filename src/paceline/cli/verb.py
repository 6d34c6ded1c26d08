"""What a verb is for typer: a command with plain help, whose words and numbers are read without pydantic."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Verb(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return plain_parameter(super().get_help_option(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.param_type_name == kind]
            # Types such as <str> tell a person nothing that the name does not.
            rows = [(record[0].partition(" <")[0], record[1]) for record in records if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def load(name: str, short_help: str) -> Any:
    """The command of a verb, from the module of its name."""
    module = import_module(f"paceline.cli.{name}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    kind = getattr(module, "COMMAND", Verb)
    app.command(name, cls=kind, short_help=short_help, context_settings=SETTINGS)(module.main)
    return plain(typer.main.get_command(app))


def plain(command: Any) -> Any:
    """The command, its parameters read without pydantic."""
    for parameter in command.params:
        plain_parameter(parameter)
    return command


def plain_parameter(parameter: Any) -> Any:
    """The parameter, read without pydantic where it takes words, a whole number or nothing."""
    described = getattr(parameter, "type_descriptor", None)
    if described is not None and described.annotation in (str, int, bool, list[str]):
        parameter._runtime_param = _Plain(described.annotation)
    return parameter


class _Plain:
    """Takes words and whole numbers as they are: typer asks pydantic, whose import takes as long as all the rest."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if self._kind is not int or value is None:
            return () if value is None and self._kind == list[str] else value
        try:
            return int(value)
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not a whole number", ctx=ctx, param=param) from None
