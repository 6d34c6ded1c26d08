"""Commands for typer: plain help texts, and text and numbers parsed without pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.output import fail

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Verb(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return plain_parameter(super().get_help_option(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "<").replace("}", ">") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.param_type_name == kind]
            # Types such as <str> add nothing to the option's name.
            rows = [(record[0].partition(" <")[0], record[1]) for record in records if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """A group of commands, each loaded when it is called."""

    verbs: ClassVar[Mapping[str, str]] = {}
    above: ClassVar[str] = ""  # the prefix of their names, such as "snapshots "

    def make(self, name: str) -> Any:
        raise NotImplementedError

    def get_help_option(self, ctx: Any) -> Any:
        return plain_parameter(super().get_help_option(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.make(cmd_name) if cmd_name in self.verbs else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.verbs.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.verbs and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.verbs, n=1)
            names = ", ".join(self.above + verb for verb in self.verbs)
            remedy = f"did you mean {self.above + near[0]!r}?" if near else f"the commands are: {names}"
            fail(f"unknown command {self.above + args[0]!r}", remedy=remedy)
        return super().resolve_command(ctx, args)


def load(name: str, short_help: str) -> Any:
    """The command from the module of the same name, or a group, if the module defines subcommands in VERBS."""
    module = import_module(f"paceline.cli.{name}")
    subcommands: Mapping[str, str] = getattr(module, "VERBS", {})
    if not subcommands:
        return _command(name, module.main, getattr(module, "COMMAND", Verb), short_help)

    class Subcommands(Group):
        verbs, above = subcommands, f"{name} "

        def make(self, name: str) -> Any:
            return _command(name, getattr(module, name), Verb, subcommands[name])

    return group(name, Subcommands, module.main, short_help=short_help, add_completion=False)


def group(name: str, kind: type[Group], callback: Any, **more: Any) -> Any:
    app = typer.Typer(
        name=name, cls=kind, callback=callback, rich_markup_mode=None, pretty_exceptions_enable=False,
        no_args_is_help=False, invoke_without_command=True, context_settings=SETTINGS, **more,
    )  # fmt: skip
    return plain(typer.main.get_command(app))


def _command(name: str, function: Any, kind: Any, short_help: str) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=kind, short_help=short_help, context_settings=SETTINGS)(function)
    return plain(typer.main.get_command(app))


def plain(command: Any) -> Any:
    """Makes the command parse its parameters without pydantic."""
    for parameter in command.params:
        plain_parameter(parameter)
    return command


def plain_parameter(parameter: Any) -> Any:
    """Makes the parameter parse without pydantic if it is text, an integer or a flag."""
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is not None and descriptor.annotation in (str, int, bool, list[str]):
        parameter._runtime_param = _Plain(descriptor.annotation)
    return parameter


class _Plain:
    """Parses text and integers. Typer would import pydantic, which takes as long as all other imports together."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if self._kind is not int or value is None:
            return () if value is None and self._kind == list[str] else value
        try:
            return int(value)
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not an integer", ctx=ctx, param=param) from None
