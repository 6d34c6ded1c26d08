"""Reads the output of a container, line by line, whatever a program writes: no line uses memory without limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import httpx2
from lightkube.resources.core_v1 import PodLog

from paceline.backends.kubernetes.api.cluster import CONNECT_S, RESPONSE_S, Cluster

LONGEST_LINE = 8 * 1024 * 1024  # bytes; the rest of a longer line is dropped
MOST_OF_TAIL = 256 * 1024  # bytes of the last lines


def read_lines(
    cluster: Cluster, pod: str, container: str, since: str | None = None, follow: bool = False
) -> Iterator[str]:
    """`since`: only lines from this time on, by the clock of the node. Raises ApiError or httpx2.HTTPError."""
    return _read(cluster, pod, {"container": container, "sinceTime": since, "follow": follow})


def last_lines(cluster: Cluster, pod: str, container: str, count: int, previous: bool = False) -> list[str]:
    """`previous`: of the container that ended before this one was started. Raises ApiError or httpx2.HTTPError."""
    params: dict[str, Any] = {"container": container, "tailLines": count, "limitBytes": MOST_OF_TAIL, "follow": False}
    if previous:
        params["previous"] = True
    return list(_read(cluster, pod, params))


def _read(cluster: Cluster, pod: str, params: dict[str, Any]) -> Iterator[str]:
    """Like `Client.log`, which keeps a line of any length in memory, and without `follow` the whole output."""
    client: Any = cluster.client._client
    request = client.prepare_request("get", PodLog, name=pod, params=params)
    if params["follow"]:  # the program may be silent for hours
        request.timeout = httpx2.Timeout(RESPONSE_S, connect=CONNECT_S, read=None)
    response = client.send(client.build_adapter_request(request), stream=True)
    try:
        if response.is_error:
            response.read()
        client.raise_for_status(response)
        for line in _split(response.iter_bytes()):
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
    finally:
        response.close()


def _split(chunks: Iterable[bytes], longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """
    >>> list(_split([b"a", b"b\\nlonger than", b" that\\n", b"\\nc"], longest=6))
    [b'ab', b'longer', b'', b'c']
    """
    begun = bytearray()
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            begun += piece[: longest - len(begun)]
            yield bytes(begun)
            begun.clear()
        begun += rest[: longest - len(begun)]
    if begun:
        yield bytes(begun)
