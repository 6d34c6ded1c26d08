"""Archives for pods: split into parts, one ConfigMap each, which a pod mounts in one folder."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

Object = dict[str, Any]

CHUNK = 700 * 1024  # bytes in one ConfigMap, which is limited to 1 MiB
# `kubectl apply` keeps a copy of each object in an annotation, which is limited to 256 KiB.
AGENT_CHUNK = 100 * 1024


def cut(archive: bytes, size: int) -> list[bytes]:
    return [archive[at : at + size] for at in range(0, len(archive), size)]


def parts(label: str, chunks: Iterable[bytes], key: str = "") -> dict[str, dict[str, bytes]]:
    """Suffix of each ConfigMap's name -> the file in it; both sort in the order of the chunks.

    >>> parts("code", [b"a", b"b"])
    {'code-00': {'00': b'a'}, 'code-01': {'01': b'b'}}
    """
    return {f"{label}-{number:02}": {f"{key}{number:02}": chunk} for number, chunk in enumerate(chunks)}


def agent_parts(archive: bytes) -> dict[str, dict[str, bytes]]:
    """
    >>> agent_parts(b"a")
    {'agent-00': {'agent-00': b'a'}}
    """
    return parts("agent", cut(archive, AGENT_CHUNK), key="agent-")


def binary_content(files: Mapping[str, bytes]) -> Object:
    """The fields of a ConfigMap that contains these files."""
    return {"immutable": True, "binaryData": {file: in_base64(content) for file, content in files.items()}}


def projected(config_maps: Iterable[str]) -> Object:
    """The source of a volume with the files of all these ConfigMaps."""
    return {"projected": {"sources": [{"configMap": {"name": name}} for name in config_maps]}}


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
