"""agent.pyz: one file with all that an agent needs in any image with Python 3.9, and that `import paceline` finds.

It is a program (`python agent.pyz '{"run": ...}'`, or `python agent.pyz pod`) and, on PYTHONPATH, a library.
"""

from __future__ import annotations

import ast
import io
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import paceline

_AGENT = ("__init__.py", "plan.py", "agent/*.py", "frameworks/**/*.py", "runtime/*.py", "storage/*.py")
_HELPERS = ("jax/*.py", "keras.py", "tensorflow/*.py", "torch/*.py")  # for programs; they import their framework
_MAIN = '''"""Starts the agent of this host."""

import sys

if sys.version_info < (3, 9):
    sys.exit("paceline: an agent needs Python 3.9 or newer, and this is %d.%d" % sys.version_info[:2])
if len(sys.argv) != 2:
    sys.exit("usage: agent.pyz pod, or agent.pyz OPTIONS (JSON)")
if sys.argv[1] == "pod":
    from paceline.agent import pod

    sys.exit(pod.main())
from paceline.agent import __main__ as agent

sys.exit(agent.main(agent.parse(sys.argv[1])))
'''


def agent_archive() -> bytes:
    """The same sources give the same bytes."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, data in sorted({"__main__.py": _MAIN.encode(), **dict(_sources())}.items()):
            info = zipfile.ZipInfo(name)  # its time is 1980
            info.create_system = 3  # Unix
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data, compresslevel=9)
    return memory.getvalue()


def _sources() -> Iterator[tuple[str, bytes]]:
    package = Path(paceline.__file__).parent
    for pattern in _AGENT + _HELPERS:
        for path in package.glob(pattern):
            yield f"{package.name}/{path.relative_to(package).as_posix()}", bare(path.read_text()).encode()


def bare(source: str) -> str:
    """Without comments and docstrings, every statement on its line: `kubectl apply` keeps a copy of all it is given in
    an annotation, which has room for 256 KiB.

    >>> bare('def f():\\n    "Says one."\\n    return 1  # not two\\n')
    'def f():\\n    ""\\n    return 1\\n'
    """
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            lines[first:last] = [f'{indent}""'] + [""] * (last - first - 1)
    return "\n".join(lines)
