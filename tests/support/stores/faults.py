"""Network faults injected by Toxiproxy: slow, throttled, silent, cut and refused connections."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from support.stores import parts
from support.stores.serving import HOST, Port, Server, running

ANSWER_S = 10.0  # it only stores the settings
Way = Literal["upstream", "downstream"]  # to the server, or back from it


class ToxiproxyRefused(Exception):
    """Toxiproxy refused a request; the message contains its answer."""


class Link:
    """A proxied connection to one port. Faults apply inside a `with` block, also to open connections."""

    def __init__(self, toxiproxy: Toxiproxy, name: str, port: Port) -> None:
        self.name = name
        self.endpoint = f"http://{port.address}"
        self._toxiproxy = toxiproxy

    def latency(self, seconds: float, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Every piece of data is delayed by this much."""
        return self._fault("latency", way, latency=int(seconds * 1000))

    def bandwidth(self, bytes_s: int, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Limits each connection to this many bytes per second, rounded down to a multiple of 1000."""
        return self._fault("bandwidth", way, rate=bytes_s // 1000)

    def silence(self, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Data is dropped and connections stay open; connections that lost data are closed afterwards."""
        return self._fault("timeout", way, timeout=0)

    def cut(self, after: int, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Each connection is closed after this many bytes."""
        return self._fault("limit_data", way, bytes=after)

    def reset(self, way: Way = "downstream") -> contextlib.AbstractContextManager[None]:
        """Each connection is reset as soon as data is sent."""
        return self._fault("reset_peer", way, timeout=0)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Open connections are closed, new ones refused."""
        self._toxiproxy.ask("POST", f"/proxies/{self.name}", {"enabled": False})
        try:
            yield
        finally:
            self._toxiproxy.ask("POST", f"/proxies/{self.name}", {"enabled": True})

    @contextlib.contextmanager
    def _fault(self, kind: str, way: Way, **attributes: int) -> Iterator[None]:
        toxics = f"/proxies/{self.name}/toxics"
        name = f"{kind}-{way}"
        self._toxiproxy.ask("POST", toxics, {"name": name, "type": kind, "stream": way, "attributes": attributes})
        try:
            yield
        finally:
            self._toxiproxy.ask("DELETE", f"{toxics}/{name}")


class Toxiproxy:
    """A server that forwards connections to other ports, with faults."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._links: dict[str, Port] = {}

    def link(self, port: int) -> Link:
        """Creates a new link to this port."""
        local = Port()
        link = Link(self, f"{local.number}-to-{port}", local)
        self._links[link.name] = local
        self.ask("POST", "/proxies", {"name": link.name, "listen": local.address, "upstream": f"{HOST}:{port}"})
        return link

    def clear(self) -> None:
        """Removes all links."""
        while self._links:
            name, port = self._links.popitem()
            self.ask("DELETE", f"/proxies/{name}")
            port.close()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        connection = http.client.HTTPConnection(self._port.address, timeout=ANSWER_S)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            content = response.read().decode()
        finally:
            connection.close()
        if response.status >= 300:
            raise ToxiproxyRefused(f"{method} {path}: {response.status} {content}")


@contextlib.contextmanager
def toxiproxy(folder: Path) -> Iterator[Toxiproxy]:
    port = Port()
    server = Server("toxiproxy", folder, port, [parts.toxiproxy(), "-host", HOST, "-port", str(port.number)], {})
    with running(folder, server):
        client = Toxiproxy(port)
        yield client
        client.clear()
