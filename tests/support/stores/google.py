"""A stand-in for Google Cloud Storage: its XML API, as obstore speaks it, in front of a real S3 server.

The XML API is S3's with other names of headers and another way to say who one is. This program checks the token of the
one service account that it knows, translates, signs, and passes on. What is stored, listed, cut into parts and refused
is the S3 server's doing, so it shows that a client sends what it should and understands the answers. It does not show:

- how Google itself behaves: its limits (one write a second to a name), its 429 and 503, its latency, its checksums
  (no x-goog-hash), who may do what (a known token may do everything);
- where tokens come from: only those that a service account signs for itself, no token server, no metadata server;
- generations as Google counts them: here the number is made from the ETag, so the same content written twice has the
  same number, and there is none but the newest;
- the JSON API and resumable uploads, which google-cloud-storage and TensorFlow use;
- copies onto a name that must be free at one moment: the server behind knows no such copies, so we look first;
- uploads as they come in: a body is read to its end before the server behind sees any of it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import http.client
import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from support.stores import signing

BLOCK = 1 << 20
BEHIND_S = 60.0  # the server behind is on this machine: one that is silent for a minute hangs

# Of a request and of an answer: what both sides call the same, and what they do not.
ASKED = {
    "cache-control", "content-disposition", "content-encoding", "content-language", "content-type",
    "if-match", "if-modified-since", "if-none-match", "if-unmodified-since", "range",
}  # fmt: skip
ASKED_OTHERWISE = {"x-goog-copy-source": "x-amz-copy-source", "x-goog-meta-": "x-amz-meta-"}
ANSWERED = {
    "accept-ranges", "cache-control", "content-disposition", "content-encoding", "content-language", "content-range",
    "content-type", "etag", "last-modified",
}  # fmt: skip
ANSWERED_OTHERWISE = {"x-amz-meta-": "x-goog-meta-"}


@dataclass(frozen=True)
class Settings:
    """Where to listen, who is known, and how to reach the server behind."""

    host: str
    port: int
    behind: str
    access: str
    secret: str
    email: str
    public_key: str


class Translator(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        key = load_pem_public_key(settings.public_key.encode())
        assert isinstance(key, RSAPublicKey)
        self.key = key
        super().__init__((settings.host, settings.port), Request)


class Request(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Translator

    def translate(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # cut off: nothing of it counts
            self.close_connection = True
        elif not self._known():
            self._refuse(401, "AuthenticationRequired")
        else:
            try:
                self._pass_on(body)
            except (OSError, http.client.HTTPException) as error:
                self.log_error("%s %s: %r", self.command, self.path, error)
                self.close_connection = True

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = translate

    def _known(self) -> bool:
        """Whether the token is one that the service account has signed for itself, and that still holds."""
        text, _, signature = self.headers.get("authorization", "").removeprefix("Bearer ").rpartition(".")
        try:
            self.server.key.verify(_decoded(signature), text.encode(), PKCS1v15(), SHA256())
        except (ValueError, InvalidSignature):
            return False
        claims = json.loads(_decoded(text.partition(".")[2]))
        return bool(claims["iss"] == self.server.settings.email and claims["exp"] > time.time())

    def _pass_on(self, body: bytes) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        headers = _translated(self.headers, ASKED, ASKED_OTHERWISE)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted == "0" and "x-amz-copy-source" not in headers:
            headers["if-none-match"] = "*"
        elif wanted is not None:
            etag = self._etag(path)
            if wanted != _generation(etag):
                self._refuse(412, "PreconditionFailed")
                return
            headers |= {"if-match": etag} if etag else {}
        if self.command == "DELETE" and not query and not self._etag(path):
            self._refuse(404, "NoSuchKey")  # S3 has no objection
            return
        connection, answer = self._ask(self.command, path, query, headers, body)
        try:
            self._answer(answer)
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        known = self.server.settings
        where, signed = signing.s3(
            known.access, known.secret, method, path, query, {**headers, "host": known.behind}, body
        )
        connection = http.client.HTTPConnection(known.behind, timeout=BEHIND_S)
        connection.request(method, where, body, signed)
        return connection, connection.getresponse()

    def _etag(self, path: str) -> str:
        """Of the object; empty if there is none."""
        connection, answer = self._ask("HEAD", path, {}, {}, b"")
        connection.close()
        return answer.getheader("etag", "") if answer.status == 200 else ""

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        headers = _translated(answer.headers, ANSWERED, ANSWERED_OTHERWISE)
        started = b""
        if self.command == "POST":
            started = answer.read()
        etag = headers.get("etag") or _etag_in(started)
        if etag:
            headers["x-goog-generation"] = _generation(etag)
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("content-length", answer.getheader("content-length") or str(len(started)))
        self.end_headers()
        self.wfile.write(started)
        while block := answer.read(BLOCK):
            self.wfile.write(block)

    def _refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("content-type", "application/xml; charset=UTF-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _translated(headers: Message, same: set[str], otherwise: Mapping[str, str]) -> dict[str, str]:
    lowered = {name.lower(): value for name, value in headers.items()}
    found = {name: value for name, value in lowered.items() if name in same}
    for old, new in otherwise.items():
        found |= {new + name.removeprefix(old): value for name, value in lowered.items() if name.startswith(old)}
    return found


def _generation(etag: str) -> str:
    """A number for this content; 0 for none."""
    return str(int(hashlib.sha256(etag.strip('"').encode()).hexdigest()[:15], 16)) if etag else "0"


def _etag_in(body: bytes) -> str:
    found = re.search(r"<ETag>(.*?)</ETag>", body.decode())
    return html.unescape(found[1]) if found else ""


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


if __name__ == "__main__":
    with Translator(Settings(**json.loads(Path(sys.argv[1]).read_text()))) as translator:
        translator.serve_forever()
