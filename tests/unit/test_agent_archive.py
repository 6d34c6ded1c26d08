"""agent.pyz: small, the same every time, with all that agents and programs need."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path

import paceline
from paceline.backends.kubernetes.archive import archives

PACKAGE = Path(paceline.__file__).parent


# ---- what is in it


def test_the_same_sources_give_the_same_bytes() -> None:
    assert archives() == archives()
    for data in archives().values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            assert names == sorted(names)
            assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_kubectl_apply_can_keep_a_copy_of_it() -> None:
    """In an annotation that has room for 262,144 bytes; the rest of its object needs some, too."""
    for data in archives().values():
        assert len(base64.b64encode(data)) < 250_000


def test_it_holds_what_agents_and_programs_need_and_nothing_else() -> None:
    names = ("agent", "frameworks", "frameworks/site", "runtime", "storage", "jax", "tensorflow", "torch")
    sources = [
        *(PACKAGE / name for name in ("__init__.py", "keras.py", "plan.py")),
        *(path for name in names for path in (PACKAGE / name).glob("*.py")),
    ]
    held: dict[str, bytes] = {}
    for data in archives().values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            held |= {name: archive.read(name) for name in archive.namelist()}
    del held["__main__.py"]
    found, _, more = held["paceline/__init__.py"].partition(b"\n__path__.append(")
    held["paceline/__init__.py"] = found
    assert b"helpers.pyz" in more
    assert held.keys() == {f"paceline/{path.relative_to(PACKAGE)}" for path in sources}
    for path in sources:
        sent = held[f"paceline/{path.relative_to(PACKAGE)}"].decode()
        assert statements(sent) == statements(path.read_text()), path


def statements(source: str) -> list[tuple[int, str]]:
    """All but docstrings, each with its line, so that a traceback says where it was."""
    made = compile(source, "", "exec", optimize=2, dont_inherit=True)
    found, codes = [], [made]
    while codes:
        code = codes.pop()
        found += [(line or 0, code.co_name) for *_, line in code.co_lines()]
        found.append((code.co_firstlineno, code.co_code.hex()))
        codes += [each for each in code.co_consts if hasattr(each, "co_code")]
    return found
