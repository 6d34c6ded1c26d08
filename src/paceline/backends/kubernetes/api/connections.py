"""Connections to the API server. A request that it refuses as unauthorized is repeated once, with new credentials."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies

import httpx2
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import User

from paceline.backends.kubernetes.api.credential_renewal import Certificate, Credential, Credentials

UNAUTHORIZED = 401
_FAILED = (httpx2.NetworkError, httpx2.RemoteProtocolError)  # a server may end the handshake if a certificate expired


_KINDS = ("connect", "read", "write", "pool")  # of timeouts


class LimitPassed(httpx2.TimeoutException):
    """The time limit of the caller has passed, which tells nothing about the server."""

    def __init__(self, request: httpx2.Request | None = None) -> None:
        super().__init__("it did not respond within the time limit", request=request)


@dataclass(frozen=True)
class Access:
    """How to reach the API server, for clients of different kinds."""

    single: SingleConfig
    credentials: Credentials

    def transport(self, until: float = math.inf) -> Transport:
        """`until`: a time of time.monotonic(), at which all requests end."""
        return Transport(self, until)

    def async_transport(self) -> AsyncTransport:
        return AsyncTransport(self)

    def tls(self, certificate: Certificate | None) -> ssl.SSLContext:
        """Raises OSError."""
        context = verify_cluster(self.single.cluster, User(), self.single.abs_file)
        if certificate is not None:
            certificate.load_into(context)
        return context


class Transport(httpx2.BaseTransport):
    def __init__(self, access: Access, until: float = math.inf) -> None:
        self._access, self._until = access, until
        self._lock = threading.Lock()
        self._certificate: Certificate | None = None
        self._client: httpx2.Client | None = None  # its connections have this certificate
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()  # of all open connections
        self._is_interrupted = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        credentials = self._access.credentials
        request.extensions = {**request.extensions, "trace": self._trace}
        credential = credentials.current(self._until)
        try:
            response = self._send(request, credential)
        except _FAILED as error:
            renewed = credentials.renewed_certificate(credential, self._until)
            if renewed is None or not _may_repeat(request, error):
                raise
            return self._send(request, renewed)
        if response.status_code == UNAUTHORIZED and not self._is_interrupted:
            renewed = credentials.renewed(credential, self._until)
            if renewed is not None:
                response.close()
                return self._send(request, renewed)
        return response

    def _send(self, request: httpx2.Request, credential: Credential) -> httpx2.Response:
        if self._is_interrupted:
            raise httpx2.ConnectError("the connections were closed", request=request)
        _authorize(request, credential)
        if self._until == math.inf:
            return self._client_with(credential.certificate).send(request, stream=True)
        limits = request.extensions.get("timeout", {})
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            raise LimitPassed(request=request)
        limits = {kind: remaining if limits.get(kind) is None else min(limits[kind], remaining) for kind in _KINDS}
        request.extensions = {**request.extensions, "timeout": limits}
        try:
            return self._client_with(credential.certificate).send(request, stream=True)
        except httpx2.TimeoutException:
            if self._until - time.monotonic() > 0:
                raise
            raise LimitPassed(request=request) from None

    def _client_with(self, certificate: Certificate | None) -> httpx2.Client:
        with self._lock:
            if self._client is None or self._certificate != certificate:
                # Connections with the earlier certificate are closed when the last request there has ended.
                self._client = httpx2.Client(**_options(self._access.tls(certificate)))
                self._certificate = certificate
            return self._client

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Called by the library for each step of a request."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._streams.add(info["return_value"])
            if self._is_interrupted:
                _shut_down(info["return_value"])

    def interrupt(self) -> None:
        """End all requests, in whichever thread, and refuse new ones."""
        self._is_interrupted = True
        for stream in list(self._streams):
            _shut_down(stream)

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


class AsyncTransport(httpx2.AsyncBaseTransport):
    def __init__(self, access: Access) -> None:
        self._access = access
        self._certificate: Certificate | None = None
        self._client: httpx2.AsyncClient | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        credentials = self._access.credentials
        credential = await asyncio.to_thread(credentials.current)
        try:
            response = await self._send(request, credential)
        except _FAILED as error:
            renewed = await asyncio.to_thread(credentials.renewed_certificate, credential)
            if renewed is None or not _may_repeat(request, error):
                raise
            return await self._send(request, renewed)
        if response.status_code == UNAUTHORIZED:
            renewed = await asyncio.to_thread(credentials.renewed, credential)
            if renewed is not None:
                await response.aclose()
                return await self._send(request, renewed)
        return response

    async def _send(self, request: httpx2.Request, credential: Credential) -> httpx2.Response:
        _authorize(request, credential)
        if self._client is None or self._certificate != credential.certificate:
            self._client = httpx2.AsyncClient(
                **_options(self._access.tls(credential.certificate), httpx2.AsyncHTTPTransport)
            )
            self._certificate = credential.certificate
        return await self._client.send(request, stream=True)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _authorize(request: httpx2.Request, credential: Credential) -> None:
    if credential.authorization:
        request.headers["Authorization"] = credential.authorization
    else:
        request.headers.pop("Authorization", None)


def _may_repeat(request: httpx2.Request, error: Exception) -> bool:
    """Whether the server has not processed the request, or it changes nothing."""
    return isinstance(error, httpx2.ConnectError) or request.method in ("GET", "HEAD")


def _options(verify: ssl.SSLContext, transport: Any = httpx2.HTTPTransport) -> dict[str, Any]:
    """For a client with TCP keepalive, to notice a lost connection although a watch or a log may be silent for hours.
    Not if there is a proxy: the library detects proxies itself, and such a transport would bypass them."""
    limits = httpx2.Limits(max_connections=None)
    if {"https", "all"} & set(getproxies()):
        return {"verify": verify, "limits": limits}
    return {"transport": transport(verify=verify, limits=limits, socket_options=_keepalive())}


def _keepalive() -> Sequence[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _shut_down(stream: Any) -> None:
    """Wakes a thread that reads from it. Closing it would not, and its number could be reused in the meantime."""
    connection = stream.get_extra_info("socket")
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not the TLS method, which is not for other threads
    except (OSError, TypeError):
        pass  # already closed
