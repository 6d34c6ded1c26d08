"""The client library for buckets, as installed here, and the certificates it needs: few images have both."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

_DATE = (1980, 1, 1, 0, 0, 0)
_MODULES = ("obstore", "typing_extensions", "certifi")


def library() -> bytes:
    """Deterministic: the same files give the same bytes."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in sorted(entry for module in _MODULES for entry in _files(module)):
            archive.writestr(zipfile.ZipInfo(name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return memory.getvalue()


def _files(module: str) -> list[tuple[str, Path]]:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return [(origin.name, origin)]
    top = origin.parent.parent
    paths = [path for path in origin.parent.rglob("*") if path.suffix in (".py", ".so", ".pem")]
    return [(path.relative_to(top).as_posix(), path) for path in paths]
