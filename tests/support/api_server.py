"""An API server of a cluster, over HTTPS: one run whose captain's output can be followed. It accepts only credentials
that a test has allowed, which can change at any time."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.backends.kubernetes.objects import names

RUN, UID = "digits-3f9a", "the-captains-job"
_TIME = "2026-11-17T12:00:00Z"


class Authority:
    """Signs certificates, which are files in this folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.path = folder / "ca.pem"
        self.path.write_bytes(self._sign("authority", self._key, None)[0])

    def write(self, name: str, file: str = "", hours: float = 24) -> tuple[Path, Path]:
        """The certificate of this name, and its key. `hours`: negative if it has expired."""
        certificate, key = (self._folder / f"{file or name}.{suffix}" for suffix in ("pem", "key"))
        pair = self._sign(name, ec.generate_private_key(ec.SECP256R1()), hours)
        certificate.write_bytes(pair[0])
        key.write_bytes(pair[1])
        return certificate, key

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, hours: float | None) -> tuple[bytes, bytes]:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(hours=24 if hours is None else hours))
            .add_extension(x509.BasicConstraints(hours is None, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), private


class ApiServer:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.allowed: set[str] = set()  # bearer tokens, and names of client certificates
        self.refused: list[str] = []  # paths of requests that were answered with 401
        self.objects: dict[str, list[dict[str, Any]]] = {"jobs": [_job()], "pods": [_pod()], "events": []}
        self.lines: list[str] = []  # of the captain
        self._changed = threading.Condition()
        self._session = 0  # connections of earlier ones end
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*self.authority.write("server"))
        tls.load_verify_locations(self.authority.path)
        tls.verify_mode = ssl.CERT_OPTIONAL
        self._http = _Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.tls = tls
        self.url = f"https://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        """Writes a kubeconfig whose user has these fields."""
        config = {
            "current-context": "shared",
            "contexts": [{"name": "shared", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": "ca.pem"}}],
            "users": [{"name": "u", "user": user}],
        }
        path.write_text(json.dumps(config))
        return path

    def allow(self, *identities: str) -> None:
        """Only these, from now on: all connections end."""
        with self._changed:
            self.allowed = set(identities)
            self._session += 1
            self._changed.notify_all()

    def write(self, event: dict[str, Any]) -> None:
        """The captain writes an event."""
        with self._changed:
            self.lines.append(json.dumps(event))
            self._changed.notify_all()

    def close(self) -> None:
        self.allow()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        kind = url.path.rpartition("/")[2]
        with self._changed:
            session = self._session
            if not _identities(request) & self.allowed:
                self.refused.append(url.path)
                return self._send(request, 401, {"kind": "Status", "code": 401, "reason": "Unauthorized"})
        query = parse_qs(url.query)
        if kind == "log":
            return self._stream(request, session, follow=query.get("follow") == ["true"])
        if "watch" in query:
            return self._stream(request, session, follow=True, silent=True)
        if kind in self.objects:
            return self._send(request, 200, {"metadata": {"resourceVersion": "1"}, "items": self.objects[kind]})
        jobs = [each for each in self.objects["jobs"] if each["metadata"]["name"] == kind]
        status = {"kind": "Status", "code": 404, "reason": "NotFound", "message": f"{kind} not found"}
        return self._send(request, 200 if jobs else 404, jobs[0] if jobs else status)

    def _send(self, request: BaseHTTPRequestHandler, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request.send_response(code)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _stream(self, request: BaseHTTPRequestHandler, session: int, follow: bool, silent: bool = False) -> None:
        request.send_response(200)
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        sent = 0
        while True:
            with self._changed:
                is_refused = self._session != session
                new, sent = ([] if silent or is_refused else self.lines[sent:]), len(self.lines)
                is_over = not follow or is_refused
                if not new and not is_over:
                    self._changed.wait(1)
            try:
                request.wfile.write("".join(f"{line}\n" for line in new).encode())
            except OSError:
                return
            if is_over:
                return


class _Server(ThreadingHTTPServer):
    tls: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:  # in the thread of the connection
            request.settimeout(30)
            wrapped = self.tls.wrap_socket(request, server_side=True)
        except OSError:
            return
        try:
            super().finish_request(wrapped, client_address)
        except OSError:
            pass
        finally:
            wrapped.close()


def _identities(request: BaseHTTPRequestHandler) -> set[str]:
    header = str(request.headers.get("Authorization", ""))
    connection: ssl.SSLSocket = request.connection
    subject: Any = (connection.getpeercert() or {}).get("subject", ())
    names_of = {value for parts in subject for key, value in parts if key == "commonName"}
    if header.startswith("Basic "):
        header = base64.b64decode(header[6:]).decode()
    return {header.removeprefix("Bearer "), *names_of} - {""}


def _job() -> dict[str, Any]:
    metadata = {"name": RUN, "uid": UID, "creationTimestamp": _TIME, "labels": {names.RUN_LABEL: RUN}}
    return {"metadata": metadata, "spec": {"template": {}}, "status": {}}


def _pod() -> dict[str, Any]:
    labels = {names.RUN_LABEL: RUN, names.ROLE_LABEL: "captain", "batch.kubernetes.io/job-name": RUN}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": RUN, "uid": UID, "controller": True}
    state = {"name": "captain", "ready": True, "restartCount": 0, "state": {"running": {}}}
    return {
        "metadata": {"name": f"{RUN}-x", "uid": "pod", "labels": labels, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "captain"}]},
        "status": {"phase": "Running", "containerStatuses": [{**state, "image": "any", "imageID": "any"}]},
    }


@contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder)
    try:
        yield server
    finally:
        server.close()
