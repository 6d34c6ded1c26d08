"""The command line: one module per command, imported only when that command runs."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    _use_utf8()
    _open_streams()
    if sys.argv[1:2] == ["run"] and not {"--help", "--dry-run"} & set(sys.argv):
        from paceline.backends import certificates_ahead

        certificates_ahead.begin()
    from paceline.cli import app

    _exit(app.main())


def _use_utf8() -> None:
    """Starts again in UTF-8 mode where the locale has another encoding: job files, and the names of files in them, are
    UTF-8. Tasks get the environment as it is."""
    if sys.getfilesystemencoding() != "utf-8" and sys.orig_argv[1:]:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Opens /dev/null for standard streams that the caller closed: other files must not get their descriptors."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _exit(code: int) -> NoReturn:
    """Skips interpreter shutdown, which takes longer than many commands."""
    import atexit

    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BrokenPipeError:
        code = code or 141  # the reader closed the pipe
    except OSError as error:
        if not code:  # otherwise the command has already reported its own error
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr, flush=True)
        code = code or 1
    finally:
        os._exit(code)
