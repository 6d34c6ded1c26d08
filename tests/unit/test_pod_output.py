"""The output of containers, which may be of another user's image: read line by line, with limited memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import httpx2
import pytest
from lightkube import ApiError, Client, KubeConfig
from lightkube.config import models

from paceline.backends.kubernetes.api import pod_output
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.serving import unready_reasons

MIB = 1024 * 1024
JSON = {"Content-Type": "application/json"}


class Body(httpx2.SyncByteStream):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        self.closed = True


def cluster_of(answer: Callable[[httpx2.Request], httpx2.Response]) -> Cluster:
    config = KubeConfig.from_one(cluster=models.Cluster(server="https://any"), user=models.User()).get()
    client = Client(config=config, namespace="team", transport=httpx2.MockTransport(answer))
    return Cluster(client, "shared", "team", "https://any")


def cluster_with(*chunks: bytes) -> Cluster:
    return cluster_of(lambda request: httpx2.Response(200, stream=Body(iter(chunks))))


def test_lines_end_where_the_program_ended_them() -> None:
    """Other characters that Python takes for the end of a line do not end one: a task could write lines in the name of
    another."""
    text = "worker-0 a\u2028worker-1 b\x0c\x85c\nworker-0 d\r\n\nno end"
    cluster = cluster_with(*(text.encode()[at : at + 3] for at in range(0, 100, 3)))
    lines = ["worker-0 a\u2028worker-1 b\x0c\x85c", "worker-0 d", "", "no end"]
    assert list(pod_output.read_lines(cluster, "p", "worker")) == lines


def test_a_line_without_end_does_not_use_all_memory() -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * MIB
        yield b"\nnext\n"

    cluster = cluster_of(lambda request: httpx2.Response(200, stream=Body(endless())))
    tracemalloc.start()
    try:
        lengths = [len(line) for line in pod_output.read_lines(cluster, "p", "captain", follow=True)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lengths == [pod_output.LONGEST_LINE, 4] and peak < 40 * MIB


def test_the_last_lines_are_limited_by_the_cluster() -> None:
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return httpx2.Response(200, content=b"one\ntwo\n")

    assert pod_output.last_lines(cluster_of(answer), "p", "export", 20) == ["one", "two"]
    assert requests[0].url.path == "/api/v1/namespaces/team/pods/p/log"
    assert dict(requests[0].url.params) == {
        "container": "export", "tailLines": "20", "limitBytes": str(pod_output.MOST_OF_TAIL), "follow": "false",
    }  # fmt: skip


@pytest.mark.parametrize("follow", [True, False])
def test_only_a_program_that_is_followed_may_be_silent(follow: bool) -> None:
    timeouts: list[float | None] = []
    sent: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        timeouts.append(request.extensions["timeout"]["read"])
        sent.append(request.url.params["sinceTime"])
        return httpx2.Response(200, content=b"")

    cluster = cluster_of(answer)
    assert list(pod_output.read_lines(cluster, "p", "captain", "2026-11-15T10:00:00.000Z", follow)) == []
    assert (timeouts[0] is None) == follow and sent == ["2026-11-15T10:00:00.000Z"]


def test_an_error_is_that_of_the_cluster_and_the_connection_is_closed() -> None:
    body = Body(iter([b'{"kind": "Status", "code": 404, "reason": "NotFound", "message": "no pod"}']))
    cluster = cluster_of(lambda request: httpx2.Response(404, headers=JSON, stream=body))
    with pytest.raises(ApiError, match="no pod") as error:
        list(pod_output.read_lines(cluster, "p", "captain"))
    assert error.value.status.code == 404 and body.closed


@pytest.mark.parametrize("state", ["running", "waiting", "terminated"])
def test_the_output_of_a_failed_export_is_that_of_the_container_that_ended(state: str) -> None:
    """Whether it was restarted already, or will be."""
    ended = {"terminated": {"exitCode": 3}}
    states = {"state": ended} if state == "terminated" else {"state": {state: {}}, "lastState": ended}
    status = {"initContainerStatuses": [{"name": "export", "restartCount": 1, **states}]}

    def answer(request: httpx2.Request) -> httpx2.Response:
        is_previous = request.url.params.get("previous") == "true"
        return httpx2.Response(200, content=b"half way\n" if is_previous == (state != "terminated") else b"begins\n")

    lines = unready_reasons.lines(cluster_of(answer), {"metadata": {"name": "p"}, "status": status})
    assert lines == ["export: half way"]
