"""Archives on their way into pods: cut into parts, each in a ConfigMap of its own, and in one folder again there."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

Object = dict[str, Any]

CHUNK = 700 * 1024  # bytes of a ConfigMap: it may hold 1 MiB
# `kubectl apply` keeps a copy of each object in an annotation of it, which has room for 256 KiB.
AGENT_CHUNK = 100 * 1024


def cut(archive: bytes, size: int) -> list[bytes]:
    return [archive[at : at + size] for at in range(0, len(archive), size)]


def parts(what: str, chunks: Iterable[bytes], key: str = "") -> dict[str, dict[str, bytes]]:
    """How the name of each ConfigMap ends, and the file that it holds; both are in the order of the chunks.

    >>> parts("code", [b"a", b"b"])
    {'code-00': {'00': b'a'}, 'code-01': {'01': b'b'}}
    """
    return {f"{what}-{number:02}": {f"{key}{number:02}": chunk} for number, chunk in enumerate(chunks)}


def agent_parts(archive: bytes) -> dict[str, dict[str, bytes]]:
    """
    >>> agent_parts(b"a")
    {'agent-00': {'agent-00': b'a'}}
    """
    return parts("agent", cut(archive, AGENT_CHUNK), key="agent-")


def held(files: Mapping[str, bytes]) -> Object:
    """What a ConfigMap holds of files."""
    return {"immutable": True, "binaryData": {file: in_base64(content) for file, content in files.items()}}


def projected(config_maps: Iterable[str]) -> Object:
    """The source of a volume that has the files of all of them."""
    return {"projected": {"sources": [{"configMap": {"name": name}} for name in config_maps]}}


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
