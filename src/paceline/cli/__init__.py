"""The command line: one small module a verb, each loaded only when it is called."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    _open_streams()
    if sys.argv[1:2] == ["run"] and not {"--help", "--dry-run"} & set(sys.argv):
        from paceline.backends import ahead

        ahead.begin()
    from paceline.cli import app

    _leave(app.main())


def _open_streams() -> None:
    """Whoever called may have closed some: then others' files would get their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _leave(code: int) -> NoReturn:
    """At once: to take an interpreter apart takes longer than many a command."""
    import atexit

    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BrokenPipeError:
        code = code or 141  # whoever read it has gone
    except OSError as error:
        if not code:  # else the command itself has said what went wrong
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr, flush=True)
        code = code or 1
    finally:
        os._exit(code)
