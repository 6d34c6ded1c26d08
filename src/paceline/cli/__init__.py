"""The command line: one small module a verb, each loaded only when it is called."""

import os
import sys


def main() -> None:
    if sys.argv[1:2] == ["run"] and not {"--help", "--dry-run"} & set(sys.argv):
        from paceline.backends import ahead

        ahead.begin()
    from paceline.cli import app

    _leave(app.main())


def _leave(code: int) -> None:
    """At once: to take an interpreter apart takes longer than many a command."""
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            code = code or 141  # whoever read it has gone
        except OSError as error:
            os.write(2, f"error: cannot write the output: {error.strerror}\n".encode())
            code = code or 1
    os._exit(code)
