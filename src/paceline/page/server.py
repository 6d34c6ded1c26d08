"""The server of the page: its address, what is printed about it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.page.access.request_check import names_for
from paceline.page.access.tokens_and_sessions import Sessions
from paceline.page.app import Page
from paceline.page.http.connections import LimitedServer, limits_for
from paceline.serve.listening import listen, raise_file_limit, url_host

PORT = 7740
_TRIED_PORTS = 20  # after the usual one

Print = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int | None = None  # None: PORT, or the next one that is free
    base: str = "/"
    password: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    allowed_hosts: tuple[str, ...] = ()  # of proxies


class PortTaken(PacelineError):
    """Another process listens on the port."""


def open_listener(settings: Settings) -> socket.socket:
    """PortTaken, PacelineError: the server cannot listen there."""
    if settings.port is not None:
        return _listen(settings.host, settings.port)
    for port in range(PORT, PORT + _TRIED_PORTS):
        try:
            return _listen(settings.host, port)
        except PortTaken:
            continue
    return _listen(settings.host, 0)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            remedy = "choose another port with --port; 0 is any free port"
            raise PortTaken("another process listens on this port", where=where, remedy=remedy) from None
        raise PacelineError(f"cannot listen: {error.strerror or error}", where=where) from None


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


def machine_names() -> tuple[str, ...]:
    name = socket.gethostname()
    return tuple(dict.fromkeys(filter(None, (name, name.partition(".")[0], socket.getfqdn()))))


def address(listener: socket.socket, settings: Settings) -> str:
    host = url_host(listener)
    if ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_unspecified:
        host = socket.getfqdn() or socket.gethostname()
    scheme = "https" if settings.certificate is not None else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}{settings.base}"


def serve(listener: socket.socket, settings: Settings, announce: Print, report_bug: Print) -> None:
    """Serves until Ctrl-C. `announce`: called with the address to open, with a new token if there is no password."""
    sys.setswitchinterval(0.001)  # a thread that parses files must not delay answers
    gc.set_threshold(50_000, 20, 20)  # what is parsed has no cycles: searching it for some takes a fifth of the time
    with contextlib.suppress(KeyboardInterrupt):  # before the server handles it
        asyncio.run(_serve(listener, settings, announce, report_bug))


async def _serve(listener: socket.socket, settings: Settings, announce: Print, report_bug: Print) -> None:
    sessions, url = Sessions(settings.password), address(listener, settings)
    names = names_for(settings.host, listener.getsockname()[0], machine_names(), settings.allowed_hosts)
    cookie = f"paceline-{listener.getsockname()[1]}"  # browsers send cookies to all ports of a host
    is_tls = settings.certificate is not None
    page = Page(sessions, names, settings.base, cookie, is_tls, lambda error: report_bug(_traceback(error)))
    tls = {"ssl_certfile": settings.certificate, "ssl_keyfile": settings.key} if is_tls else {}
    server = LimitedServer(page.app, limits_for(raise_file_limit()), page.feeds.sweep, **tls)

    def new_address() -> None:
        announce(url if sessions.has_password else f"{url}?token={sessions.new_token()}")

    new_address()
    threading.Thread(target=_import_ahead, daemon=True).start()
    if not sessions.has_password:
        _on_enter(new_address)
    await server.serve([listener])


def _import_ahead() -> None:
    """What the first views need and what takes a quarter of a second, before the user has opened the address."""
    for module in ("pydantic_core", "paceline.backends.kubernetes.api.kubeconfig"):
        importlib.import_module(module)


def _on_enter(call: Callable[[], None]) -> None:
    """Calls the function whenever the user presses Enter in the terminal."""

    def wait() -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while os.read(0, 4096):  # a thread that waits in sys.stdin would hold its lock when the interpreter ends
                call()

    try:
        # A process in the background would be stopped by reading the terminal.
        if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
            threading.Thread(target=wait, daemon=True).start()
    except OSError:
        return


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))
