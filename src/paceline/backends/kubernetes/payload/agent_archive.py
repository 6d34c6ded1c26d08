"""agent.pyz: one file with everything an agent needs in any image with Python 3.9, including `import paceline`.

It is a program (`python agent.pyz '{"run": ...}'`, `python agent.pyz pod`, `python agent.pyz export`) and, on
PYTHONPATH, a library.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import paceline

_MODULES = ("__init__.py", "errors.py", "keras.py", "plan.py")
_FOLDERS = ("agent", "frameworks", "jax", "runtime", "storage", "tensorflow", "torch")
_QUOTES = '"""'
_MAIN = '''"""Starts the agent of this host."""

import sys

if sys.version_info < (3, 9):
    sys.exit("paceline: an agent needs Python 3.9 or newer, and this is %d.%d" % sys.version_info[:2])
if len(sys.argv) != 2:
    sys.exit("usage: agent.pyz pod, agent.pyz export, or agent.pyz OPTIONS (JSON)")
if sys.argv[1] == "pod":
    from paceline.agent import pod

    sys.exit(pod.main())
if sys.argv[1] == "export":
    from paceline.agent import export_container

    sys.exit(export_container.main())
from paceline.agent import __main__ as agent

sys.exit(agent.main(agent.parse(sys.argv[1])))
'''


def agent_archive() -> bytes:
    """Deterministic: the same sources give the same bytes."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, data in sorted({"__main__.py": _MAIN, **dict(_sources())}.items()):
            info = zipfile.ZipInfo(name)  # dated 1980
            info.create_system = 3  # Unix
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data, compresslevel=9)
    return memory.getvalue()


def _sources() -> Iterator[tuple[str, str]]:
    package = Path(paceline.__file__).parent
    paths = [package / name for name in _MODULES]
    for folder in _FOLDERS:
        paths += (package / folder).rglob("*.py")
    for path in paths:
        yield f"{package.name}/{path.relative_to(package).as_posix()}", strip_comments(path.read_text())


def strip_comments(source: str) -> str:
    """The source without docstrings and most comments; line numbers stay the same. A fast heuristic for Paceline's
    own sources, since each run waits for it.
    """
    lines = source.split("\n")
    within, docstring, before = False, False, ":"
    for number, line in enumerate(lines):
        text = line.strip()
        if not within:
            docstring = text.startswith(_QUOTES) and before.endswith(":")
            before = text or before
        begun, within = within, within != bool(line.count(_QUOTES) % 2)
        if docstring:
            lines[number] = "" if begun else line.replace(text, '""')
        elif not begun and text.startswith("#"):
            lines[number] = ""
        elif not begun and not within:
            code, _, comment = line.rpartition("  # ")
            if code and not {'"', "'"} & set(comment):  # otherwise it may be part of a string
                lines[number] = code
    return "\n".join(lines)
