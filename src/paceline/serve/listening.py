"""The address that the server listens on, and the names by which clients may call it there."""

from __future__ import annotations

import ipaddress
import json
import re
import resource
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d*)?")
_BACKLOG = 2048
_MOST_FILES = 65536


def listen(host: str, port: int) -> socket.socket:
    """`host`: a name or an address; `::` and "" stand for all addresses of the machine, of IPv4 and IPv6.

    Raises OSError.
    """
    if not host:
        try:
            return listen("::", port)
        except OSError:
            host = "0.0.0.0"  # IPv6 is disabled on this machine
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_any = family == socket.AF_INET6 and address[0] == "::"
    listener = socket.create_server(
        address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_any and socket.has_dualstack_ipv6()
    )
    # Connections inherit it. asyncio sets it only for sockets that were created with the number of the protocol;
    # without it, the second part of a response waits up to 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def raise_file_limit() -> int:
    """Every connection is an open file. Returns how many files this process may have open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def url_host(listener: socket.socket) -> str:
    host = str(listener.getsockname()[0])
    return f"[{host}]" if ":" in host else host


def allowed_hosts(listener: socket.socket, host: str) -> frozenset[str]:
    """Names that requests may use in their Host header; empty: any.

    Only for loopback: a web page could otherwise have its own name resolve to 127.0.0.1 (DNS rebinding), and the
    browser would let it read the responses.
    """
    if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
        return frozenset()
    return frozenset((*_LOOPBACK_NAMES, url_host(listener), host.lower()))


class HostCheck:
    """Middleware that answers 421 to requests for another host."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hosts:
            names = [value for name, value in scope["headers"] if name == b"host"]
            if len(names) > 1 or (names and not self._is_allowed(names[0].decode("latin-1"))):
                await self._refuse(names, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        match = _HOST.fullmatch(name.lower())
        return match is not None and match[1].removesuffix(".") in self._hosts

    async def _refuse(self, names: list[bytes], send: Send) -> None:
        shown = ", ".join(name.decode("latin-1") for name in names)[:200]
        allowed = ", ".join(sorted(self._hosts))
        body = json.dumps({"error": f"this server does not answer for the host {shown!r}, only for {allowed}"}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 421, "headers": headers})
        await send({"type": "http.response.body", "body": body})
