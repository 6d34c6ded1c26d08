"""`paceline page`: all runs in a browser."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import expanded, fail, note, print_error, tell

if TYPE_CHECKING:
    import socket

    from paceline.page.server import Settings

HOST = "127.0.0.1"
SHORTEST_PASSWORD = 8
MOST_BUGS = 10
_BASE = re.compile(r"(/[A-Za-z0-9._~@%+-]+)*/?")


def main(
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="PORT", help="Port (default: 7740, or the next free one; 0: any free port).",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS",
            help="Address to listen on. Other machines can connect only if this is not a loopback address; that "
            "requires a password, and uses TLS.",
        ),
    ] = HOST,
    password_file: Annotated[
        str,
        typer.Option(
            "--password-file", metavar="FILE",
            help="File with the password in its first line (default: none on a loopback address; otherwise prompt for "
            "it).",
        ),
    ] = "",
    certificate: Annotated[
        str,
        typer.Option(
            "--certificate", metavar="FILE",
            help="TLS certificate in PEM format (default: no TLS on a loopback address; otherwise self-signed).",
        ),
    ] = "",
    key: Annotated[
        str, typer.Option("--key", metavar="FILE", help="Private key of the certificate, in PEM format.")
    ] = "",
    base_path: Annotated[
        str, typer.Option("--base-path", metavar="PATH", help="URL path behind a proxy, such as /paceline.")
    ] = "/",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME[:PORT]",
            help="Another host name under which browsers open this page, such as a proxy's (repeatable).",
        ),
    ] = None,
) -> int:  # fmt: skip
    """Show all runs in a browser, until Ctrl-C.

    \b
    Examples:
      paceline page
      paceline page --host 0.0.0.0 --password-file password.txt
      paceline page --base-path /paceline --allow-host hub.example.com     Behind a proxy

    The page shows the runs known to this machine, runs on the same clusters, and those in the current kubeconfig
    context. By default, only this machine can connect. The printed address contains a token that works once; press
    Enter to get a new address.
    """
    if port is not None and not 0 <= port < 65536:
        fail("invalid port", where=f"--port {port}", remedy="use 0 to 65535")
    if bool(certificate) != bool(key):
        fail("use --certificate and --key together")
    base = _base(base_path)
    hosts = tuple(_host_name(each) for each in allow_host or ())
    from paceline.page.access import certificate as certificates
    from paceline.page.server import Settings, is_loopback, machine_names, open_listener, serve

    with ExitStack() as stack:
        listener = stack.enter_context(open_listener(Settings(host, port)))
        is_local = is_loopback(listener)
        password = _password(password_file, is_local)
        files: tuple[Path, Path] | None = (expanded(certificate), expanded(key)) if certificate else None
        if files is not None:
            certificates.check(*files)
        elif not is_local:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-page-")))
            own_address = str(listener.getsockname()[0])
            files = certificates.make(folder, list(dict.fromkeys([host, own_address, *machine_names(), "localhost"])))
        own_certificate, own_key = files or (None, None)
        settings = Settings(host, port, base, password, own_certificate, own_key, hosts)
        if files is not None:
            tell(f"certificate SHA-256: {certificates.fingerprint(files[0])}")
        _explain(listener, settings, is_local)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a browser that closes a connection must not end this command
        serve(listener, settings, lambda url: print(url, flush=True), _Bugs().report)
    return 0


def _explain(listener: socket.socket, settings: Settings, is_local: bool) -> None:
    port = listener.getsockname()[1]
    if settings.port is None and port != _usual_port():
        note(f"port {_usual_port()} is in use: this page uses port {port}")
    if is_local and (connection := os.environ.get("SSH_CONNECTION", "").split()):
        server = connection[2] if len(connection) == 4 else "THIS-MACHINE"
        tell("run this on your own machine, then open the address below:")
        tell(f"  ssh -N -L {port}:127.0.0.1:{port} {_user()}@{server}")
    tell("press Ctrl-C to quit")


def _usual_port() -> int:
    from paceline.page.server import PORT

    return PORT


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "USER"


def _base(path: str) -> str:
    if not path.startswith("/") or not _BASE.fullmatch(path) or "/../" in f"{path}/" or "/./" in f"{path}/":
        fail("invalid path", where=f"--base-path {path!r}", remedy="use a path such as /paceline")
    return path.rstrip("/") + "/"


def _host_name(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?", text):
        fail("invalid host name", where=f"--allow-host {text!r}", remedy="use hub.example.com or hub.example.com:8443")
    return text.lower()


def _password(file: str, is_local: bool) -> str | None:
    """From a file or from the terminal: other users of this machine can read command lines."""
    if file:
        path = expanded(file)
        try:
            text = path.read_text().splitlines()[:1]
        except UnicodeDecodeError:
            fail("the password is not text", where=str(path), remedy="use a file in UTF-8")
        if path.stat().st_mode & 0o077:
            note(f"{path}: other users can read the password; use: chmod 600 {path}")
        return _long_enough(text[0] if text else "", str(path))
    if is_local:
        return None
    if not sys.stdin.isatty():
        fail("other machines can connect only with a password", remedy="use --password-file FILE")
    from getpass import getpass

    password = _long_enough(getpass("Password for this page: "), "")
    if getpass("Again: ") != password:
        fail("the passwords differ")
    return password


def _long_enough(password: str, where: str) -> str:
    if len(password) < SHORTEST_PASSWORD:
        fail("the password is too short", where=where, remedy=f"use at least {SHORTEST_PASSWORD} characters")
    return password


class _Bugs:
    """Prints each bug once, however often it shows."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def report(self, traceback: str) -> None:
        if traceback not in self._printed and len(self._printed) < MOST_BUGS:
            self._printed.add(traceback)
            print_error(f"this is a bug in Paceline:\n{traceback}")
