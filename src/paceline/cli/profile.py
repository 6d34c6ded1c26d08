"""`paceline profile`: profiles the next steps of a run, as files for TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ContextOption, JsonOption, NamespaceOption, OnOption, RunArgument, seconds_of
from paceline.cli.output import expanded, note, one_of, print_json, tell

if TYPE_CHECKING:
    from paceline.client.diagnosis.profile import TaskProfile


def main(
    run: RunArgument = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Number of steps (up to 1000).")] = 20,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", metavar="NAME", help="Only this task or role (repeatable).", show_default=False),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="DIR", help="Copy the files to this folder (default: `tensorboard` in the run's folder)."
        ),
    ] = "",
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", metavar="DURATION", show_default=False,
            help="Time limit for the steps (default: 2m, up to 1h). If it is reached, the profile contains the steps "
            "completed so far.",
        ),
    ] = "2m",
    output: JsonOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Profile the next steps of a run with its framework's own profiler, in all tasks that train.

    Prints the paths of the files, which TensorBoard can show. Tasks must report their steps, with `paceline.report` or
    a helper; they continue afterwards. Exit code: 0 if there is at least one profile, otherwise 1.
    """
    one_of(output, ("json",))
    seconds = seconds_of(timeout, "--timeout")
    from paceline.client.diagnosis.profile import Profile, profile_folder, take
    from paceline.client.reading.find_run import Target, find_run, refresh

    target = find_run(run, Target(on, context, namespace))
    refresh(target, notify=note)
    folder = expanded(to) if to else None
    profiles = take(target, task or [], steps, seconds, folder, tell)
    if output:
        print_json(Profile(target.name, profile_folder(target, folder), tuple(profiles)).to_dict())
    else:
        _print(profiles)
    return 0 if any(profile.files for profile in profiles) else 1


def _print(profiles: list[TaskProfile]) -> None:
    for profile in profiles:
        if profile.problem:
            tell(f"{profile.task}: {'' if profile.files else 'no profile: '}{profile.problem}")
        for file in profile.files:
            print(file)
