"""Commands that run Python code without importing anything from the working folder.

With `-c` and `-m`, Python searches the working folder first: a file such as `types.py` there would replace a module of
the standard library, and other users may be able to write to that folder. `-P` needs Python 3.11, and `-I` would ignore
the user's PYTHONPATH.
"""

from __future__ import annotations

_DROP_WORKING_FOLDER = "import sys; sys.path[:1] = [path for path in sys.path[:1] if path]"  # it is the empty path
_RUN_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def code_command(python: str, code: str, *arguments: str) -> list[str]:
    """Like `python -c`."""
    return [python, "-c", f"{_DROP_WORKING_FOLDER}; {code}", *arguments]


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Like `python -m`."""
    return code_command(python, _RUN_MODULE, module, *arguments)
