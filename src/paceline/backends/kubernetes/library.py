"""The library that speaks to buckets, as this machine has it, and the certificates it needs: few images have both."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

_ALWAYS = (1980, 1, 1, 0, 0, 0)
_NEEDED = ("obstore", "typing_extensions", "certifi")


def library() -> bytes:
    """One archive, the same bytes each time."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in sorted((name, path) for needed in _NEEDED for name, path in _files(needed)):
            archive.writestr(zipfile.ZipInfo(name, _ALWAYS), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return packed.getvalue()


def _files(module: str) -> list[tuple[str, Path]]:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return [(origin.name, origin)]
    top = origin.parent.parent
    found = [path for path in origin.parent.rglob("*") if path.suffix in (".py", ".so", ".pem")]
    return [(path.relative_to(top).as_posix(), path) for path in found]
