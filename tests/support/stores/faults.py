"""Faults on the way to a server, by Toxiproxy: slow, narrow, silent, cut and refused connections."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from support.stores import parts
from support.stores.serving import HOST, Port, Server, running

ANSWER_S = 10.0  # it only notes what is wanted
Way = Literal["upstream", "downstream"]  # to the server, or back from it


class ToxiproxyRefused(Exception):
    """Toxiproxy did not take a request; the message has its answer."""


class Link:
    """A way to one port. What is wrong with it is wrong inside a `with`, for connections that are open too."""

    def __init__(self, toxiproxy: Toxiproxy, name: str, port: Port) -> None:
        self.name = name
        self.endpoint = f"http://{port.address}"
        self._toxiproxy = toxiproxy

    def latency(self, seconds: float, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """All data comes later, each piece by as much."""
        return self._wrong("latency", way, latency=int(seconds * 1000))

    def bandwidth(self, bytes_s: int, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """So many bytes a second for each connection, to the thousand."""
        return self._wrong("bandwidth", way, rate=bytes_s // 1000)

    def silence(self, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Data is lost and connections stay open; those that lost some are closed afterwards."""
        return self._wrong("timeout", way, timeout=0)

    def cut(self, after: int, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Each connection is closed when so many bytes have passed."""
        return self._wrong("limit_data", way, bytes=after)

    def reset(self, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Each connection is reset as soon as something is sent."""
        return self._wrong("reset_peer", way, timeout=0)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Open connections are closed, new ones refused."""
        self._toxiproxy.ask("POST", f"/proxies/{self.name}", {"enabled": False})
        try:
            yield
        finally:
            self._toxiproxy.ask("POST", f"/proxies/{self.name}", {"enabled": True})

    @contextlib.contextmanager
    def _wrong(self, kind: str, way: Way, **how: int) -> Iterator[None]:
        toxics = f"/proxies/{self.name}/toxics"
        name = f"{kind}-{way}"
        self._toxiproxy.ask("POST", toxics, {"name": name, "type": kind, "stream": way, "attributes": how})
        try:
            yield
        finally:
            self._toxiproxy.ask("DELETE", f"{toxics}/{name}")


class Toxiproxy:
    """A server that listens on ports and passes on to others what comes in, with faults."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._links: dict[str, Port] = {}

    def link(self, port: int) -> Link:
        """A new way to this port."""
        ours = Port()
        link = Link(self, f"{ours.number}-to-{port}", ours)
        self._links[link.name] = ours
        self.ask("POST", "/proxies", {"name": link.name, "listen": ours.address, "upstream": f"{HOST}:{port}"})
        return link

    def clear(self) -> None:
        """Without any link."""
        while self._links:
            name, port = self._links.popitem()
            self.ask("DELETE", f"/proxies/{name}")
            port.close()

    def ask(self, method: str, path: str, what: Mapping[str, Any] | None = None) -> None:
        connection = http.client.HTTPConnection(self._port.address, timeout=ANSWER_S)
        try:
            connection.request(method, path, json.dumps(what) if what is not None else None)
            answer = connection.getresponse()
            said = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ToxiproxyRefused(f"{method} {path}: {answer.status} {said}")


@contextlib.contextmanager
def toxiproxy(folder: Path) -> Iterator[Toxiproxy]:
    port = Port()
    server = Server("toxiproxy", folder, port, [parts.toxiproxy(), "-host", HOST, "-port", str(port.number)], {})
    with running(folder, server):
        found = Toxiproxy(port)
        yield found
        found.clear()
