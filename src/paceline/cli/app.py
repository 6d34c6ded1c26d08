"""Assembles the commands, runs one, and turns errors into a message and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer

from paceline.cli.output import note, print_error, print_json
from paceline.cli.typer_commands import Group, group, load
from paceline.errors import PacelineError, is_out_of_threads
from paceline.view.text.option_names import reword
from paceline.view.text.terminal import guard, silence

PROGRAM = "paceline"
VERBS = {
    "init": "Write a job file for a training script.",
    "validate": "Check a job file.",
    "plan": "Show what a job file would run.",
    "render": "Print the Kubernetes objects of a run.",
    "schema": "Print the JSON Schema of job files.",
    "run": "Run a job on this machine or on a Kubernetes cluster.",
    "ls": "List runs.",
    "status": "Show the status of a run and its tasks.",
    "watch": "Watch a run, or all runs, in the terminal.",
    "logs": "Show the output of a run's tasks.",
    "events": "Show the events of a run.",
    "stacks": "Show what the tasks of a run are doing.",
    "profile": "Profile the next steps of a run with its framework's own profiler.",
    "wait": "Wait until a run has ended, has reached a step or has committed a snapshot.",
    "snapshots": "List, show, copy, verify or delete a run's snapshots.",
    "try": "Run the job's `try` command with a snapshot of a run.",
    "export": "Export a model from a snapshot of a run.",
    "serve": "Serve a run's model over REST.",
    "scale": "Change the number of hosts of a run.",
    "pause": "Pause a run and release its hosts.",
    "resume": "Continue a paused run.",
    "stop": "Stop a run.",
    "delete": "Delete runs and, with --snapshots, their snapshots.",
    "tensorboard": "Show a run in TensorBoard.",
    "page": "Show all runs in a browser.",
    "metrics": "Print metrics of runs for Prometheus, or serve them.",
    "doctor": "Check this machine or a cluster.",
}


_EXHAUSTED = {  # what to do if this machine, or a limit of this user, is exhausted
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or end other processes",
    errno.ENOMEM: "this machine does not have enough free memory",
}


def main(args: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = guard(sys.stdout), guard(sys.stderr)
    if arguments[:1] != ["run"]:
        # When the reader closes the pipe (`paceline logs | head`), exit as other Unix programs do.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = _command().main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except PacelineError as error:
        return _report(error, arguments)
    except typer.Abort:
        return 130
    except typer.TyperException as error:
        error.show() if hasattr(error, "show") else print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        silence(sys.stdout)  # the reader closed the pipe
        return 141
    except Exception as error:
        return _explain(error, arguments)


def _command() -> Any:
    return group(PROGRAM, Verbs, _about)


def _about(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version and exit.")
) -> int:
    """Run distributed training from one job file: TensorFlow, torch, JAX or any other program.

    \b
    Examples:
      paceline init                 Write job.yaml for the training script in this folder
      paceline run job.yaml         Train, and recover from failures
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


def _report(error: PacelineError, arguments: list[str]) -> int:
    """Prints one line to stderr and, with `-o json`, also an object with the error's fields to stdout."""
    reword(error)
    if _wants_json(arguments):
        print_json(error.to_dict())
    print_error(error)
    return error.exit_code


def _wants_json(arguments: list[str]) -> bool:
    """
    >>> _wants_json(["status", "-o", "json"]), _wants_json(["run", "--", "train.py", "-o", "json"])
    (True, False)
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_two_words = any(pair in (("-o", "json"), ("--output", "json")) for pair in pairwise(options))
    return as_two_words or bool({"-ojson", "--output=json"} & set(options))


def _explain(error: Exception, arguments: list[str]) -> int:
    if isinstance(error, OSError) and error.filename is not None:
        print_error(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        print_error(f"cannot write: {error.strerror}")
        return 1
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        print_error(f"{error.strerror}; {_EXHAUSTED[error.errno]}")
        return 1
    if is_out_of_threads(error) or isinstance(error, MemoryError):
        number = errno.ENOMEM if isinstance(error, MemoryError) else errno.EAGAIN
        print_error(f"{os.strerror(number)}; {_EXHAUSTED[number]}")
        return 1
    print_error(f"this is a bug in Paceline: {type(error).__name__}: {error}")
    path = _save_traceback(error, arguments)
    if path:
        note(f"the traceback is in {path}")
    return 1


def _save_traceback(error: Exception, arguments: list[str]) -> str | None:
    import tempfile
    import traceback

    from paceline.view.files.run_folders import NoHome, home

    report = f"paceline {' '.join(arguments[:1])}\n" + "".join(traceback.format_exception(error))
    try:
        folders = [str(home()), None]
    except NoHome:
        folders = [None]
    for folder in folders:
        try:
            handle, path = tempfile.mkstemp(prefix="paceline-bug-", suffix=".txt", dir=folder)
        except OSError:
            continue
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(report)
        return path
    return None
