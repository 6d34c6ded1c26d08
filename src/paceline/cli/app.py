"""Puts the verbs together, calls one, and turns whatever goes wrong into a line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer

from paceline.cli.say import Failure, complain
from paceline.cli.verb import Group, group, load

PROGRAM = "paceline"
VERBS = {
    "init": "Write a job file for a training script.",
    "validate": "Check a job file.",
    "plan": "Show what a job file would run.",
    "render": "Print the Kubernetes objects of a run.",
    "schema": "Print the JSON Schema of job files.",
    "run": "Run a job on this machine, or on a cluster.",
    "ls": "List runs.",
    "status": "Show how a run stands.",
    "logs": "Show the output of a run's tasks.",
    "events": "Show what happened in a run.",
    "snapshots": "Look at a run's snapshots, copy, check or delete them.",
    "try": "Run the job's own program with a snapshot of a run.",
    "export": "Export a model from a snapshot of a run.",
    "serve": "Serve the model of a run over REST.",
    "stop": "Stop a run.",
    "delete": "Delete runs; their snapshots only where asked to.",
    "tensorboard": "Show a run in TensorBoard.",
    "doctor": "Check this machine, or a cluster.",
}
_EXPLAINED = (
    ("paceline.job", "JobError", 2),
    ("paceline.backends.ids", "BadRunId", 2),
    ("paceline.backends.local", "CannotRun", 2),
    ("paceline.backends.kubernetes.cluster", "Unreachable", 1),
    ("paceline.backends.kubernetes.cluster", "Refused", 1),
    ("paceline.backends.kubernetes.prepare", "CannotSubmit", 2),
    ("paceline.backends.kubernetes.submit", "Left", 1),
    ("paceline.backends.kubernetes.deployed", "NotServed", 1),
    ("paceline.backends.kubernetes.code", "CodeError", 2),
    ("paceline.view.runs", "NoRun", 2),
    ("paceline.view.places", "NoPlace", 2),
    ("paceline.view.places", "OutOfReach", 1),
    ("paceline.view.snapshots", "NoSnapshot", 2),
    ("paceline.view.snapshots", "CannotCopy", 1),
    ("paceline.view.programs", "NoProgram", 2),
    ("paceline.view.exporting", "NotExported", 1),
    ("paceline.storage.store", "StoreError", 1),
    ("paceline.storage.manifest", "Damaged", 1),
    ("paceline.storage.manifest", "Newer", 1),
)


def main(args: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if arguments[:1] != ["run"]:
        # A reader whose reader has gone (`paceline logs | head`) ends as any other Unix program does.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = _command().main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except Failure as failure:
        complain(failure.message)
        return failure.code
    except typer.Abort:
        return 130
    except typer.TyperException as error:
        error.show() if hasattr(error, "show") else complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        from paceline.view.terminal import silence

        silence(sys.stdout)  # whoever read it has gone
        return 141
    except Exception as error:
        return _explain(error, arguments)


def _command() -> Any:
    return group(PROGRAM, Verbs, _about)


def _about(context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version.")) -> int:
    """One job file for distributed training: TensorFlow, torch, JAX or anything else, as real processes.

    \b
    paceline init             writes job.yaml for the training script of this folder
    paceline run job.yaml     trains, and survives what fails on the way
    paceline run --framework torch --workers 4 -- python train.py
    """
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            print(f"{PROGRAM} {installed('paceline')}")
        except PackageNotFoundError:
            print(f"{PROGRAM} (not installed)")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


class Verbs(Group):
    verbs = VERBS

    def make(self, name: str) -> Any:
        return load(name, VERBS[name])


def _explain(error: Exception, arguments: list[str]) -> int:
    for module, name, code in _EXPLAINED:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            complain(str(error))
            return code
    if isinstance(error, OSError) and error.filename is not None:
        complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        complain(f"cannot write: {error.strerror}")
        return 1
    complain(f"this is a bug in Paceline, not a mistake of yours: {type(error).__name__}: {error}")
    where = _keep_traceback(error, arguments)
    if where:
        complain(f"the traceback is in {where}", word="note")
    return 1


def _keep_traceback(error: Exception, arguments: list[str]) -> str | None:
    import tempfile
    import traceback

    from paceline.view.runs import home

    told = f"paceline {' '.join(arguments[:1])}\n" + "".join(traceback.format_exception(error))
    for folder in (str(home()), None):
        try:
            handle, path = tempfile.mkstemp(prefix="paceline-bug-", suffix=".txt", dir=folder)
        except OSError:
            continue
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(told)
        return path
    return None
