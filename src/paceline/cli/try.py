"""`paceline try`: the job's own program with a snapshot of a run, in place of this one."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption
from paceline.cli.reading import CodeOption, JobOption, SnapshotOption, Where, restored
from paceline.cli.verb import Verb

_ARGUMENTS = "arguments"


class COMMAND(Verb):
    """Keeps what stands behind `--` apart: it is for the job's program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGUMENTS] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "[RUN]", "[-- ARGS...]"]


def main(
    typed: typer.Context,
    run: Where = None,
    snapshot: SnapshotOption = None,
    job: JobOption = "",
    code: CodeOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Run the job's `try.command`, followed by ARGS, with a snapshot of the run, on this machine.

    \b
    paceline try translate-3f9a -- "este é um problema"
    paceline try s3://bucket/path/translate-3f9a --snapshot 1200 --job job.yaml < sentences.txt

    It runs in the job's code folder, and finds the snapshot's files in the folder PACELINE_RESTORE. Input, output and
    exit code are its own. A snapshot is fetched once, and kept here for the next time.
    """
    from paceline.view import programs

    with restored(run, snapshot, on, context, namespace, lambda source: programs.find(source, "try", job, code)) as (
        program,
        held,
        _,
    ):
        program = program.given(typed.meta.get(_ARGUMENTS, ()), PACELINE_RESTORE=str(held.folder))
        os.set_inheritable(held.lock, True)
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(program.folder)
        os.execve(program.argv[0], program.argv, dict(program.env))
