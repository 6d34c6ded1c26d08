"""The files of the page itself, which are part of the package."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from paceline.page.http.errors import NotFound

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "woff2": "font/woff2",
    "txt": "text/plain; charset=utf-8",
}
_INDEX = "index.html"
_MOST = 500  # files in memory


async def static_file(request: Request) -> Response:
    path = request.path_params.get("path") or _INDEX
    segments = path.split("/")
    kind = _TYPES.get(segments[-1].rpartition(".")[2])
    if kind is None or not all(map(_SEGMENT.fullmatch, segments)):
        raise NotFound("there is no such file")
    try:
        data, tag = _contents(path)
    except OSError:
        raise NotFound("there is no such file") from None
    headers = {"etag": tag, "cache-control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    return Response(data, 200, {**headers, "content-type": kind})


@functools.lru_cache(_MOST)
def _contents(path: str) -> tuple[bytes, str]:
    """A file, and its ETag. Raises OSError."""
    file = files("paceline.page") / "static"
    for segment in path.split("/"):
        file = file / segment
    data = file.read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
