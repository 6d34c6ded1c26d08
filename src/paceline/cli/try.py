"""`paceline try`: replaces this process by the job's `try` command, with a snapshot of a run."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption
from paceline.cli.snapshot_options import CodeOption, JobOption, RunOrLocation, SnapshotOption, restored
from paceline.cli.typer_commands import Verb

_ARGUMENTS = "arguments"


class COMMAND(Verb):
    """Separates the arguments after `--`, which belong to the job's program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGUMENTS] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "[RUN]", "[-- ARGS...]"]


def main(
    invocation: typer.Context,
    run: RunOrLocation = None,
    snapshot: SnapshotOption = None,
    job: JobOption = "",
    code: CodeOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Run the job's `try.command`, followed by ARGS, on this machine with a snapshot of a run.

    \b
    Examples:
      paceline try translate-3f9a -- "este é um problema"
      paceline try s3://bucket/path/translate-3f9a --snapshot 1200 --job job.yaml < sentences.txt

    The command runs in the job's code folder. The environment variable PACELINE_RESTORE contains the path of the
    folder with the snapshot's files. Standard input, output and the exit code are those of the command. Snapshots are
    cached on this machine.
    """
    from paceline.client.models import job_programs

    with restored(
        run, snapshot, on, context, namespace, endpoint, lambda source: job_programs.find(source, "try", job, code)
    ) as (
        program,
        restored_snapshot,
        _,
    ):
        program = program.extended(invocation.meta.get(_ARGUMENTS, ()), PACELINE_RESTORE=str(restored_snapshot.folder))
        os.set_inheritable(restored_snapshot.lock, True)
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(program.folder)
        os.execve(program.argv[0], program.argv, dict(program.env))
