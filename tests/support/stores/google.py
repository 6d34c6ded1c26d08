"""A substitute for Google Cloud Storage: its XML API, as obstore uses it, in front of a real S3 server.

The XML API is that of S3 with other header names and another authentication. This program checks the token of the one
service account that it knows, then translates, signs and forwards the request. The S3 server does the storing, listing,
multipart uploads and refusals. So it shows that a client sends correct requests and understands the answers. It does
not reproduce:

- the behavior of Google itself: its limits (one write per second to a name), its 429 and 503, its latency, its
  checksums (no x-goog-hash), its permissions (a valid token may do everything);
- the sources of tokens: only self-signed tokens of a service account, no token server, no metadata server;
- Google's generation numbers: here the number is computed from the ETag, so the same content written twice has the
  same number, and only the newest generation exists;
- the JSON API and resumable uploads, which google-cloud-storage and TensorFlow use;
- atomic copies to a name that must not exist: the upstream server has no such copies, so we check first;
- streamed uploads: a body is read completely before it is forwarded.
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
BEHIND_S = 60.0  # the upstream server is on this machine: if it does not answer for a minute, it hangs

# Headers of requests and answers: those with the same name on both sides, and those with different names.
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
    """The address to listen on, the known account, and the upstream server."""

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
    """Handles the requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Translator

    def translate(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # truncated: ignored completely
            self.close_connection = True
        elif not self._is_authorized():
            self._refuse(401, "AuthenticationRequired")
        else:
            try:
                self._pass_on(body)
            except (OSError, http.client.HTTPException) as error:
                self.log_error("%s %s: %r", self.command, self.path, error)
                self.close_connection = True

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = translate

    def _is_authorized(self) -> bool:
        """Whether the token is signed by the service account and has not expired."""
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
        generation = self.headers.get("x-goog-if-generation-match")
        if generation == "0" and "x-amz-copy-source" not in headers:
            headers["if-none-match"] = "*"
        elif generation is not None:
            etag = self._etag(path)
            if generation != _generation(etag):
                self._refuse(412, "PreconditionFailed")
                return
            headers |= {"if-match": etag} if etag else {}
        if self.command == "DELETE" and not query and not self._etag(path):
            self._refuse(404, "NoSuchKey")  # S3 would report success
            return
        connection, answer = self._ask(self.command, path, query, headers, body)
        try:
            self._answer(answer)
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        settings = self.server.settings
        target, signed = signing.s3(
            settings.access, settings.secret, method, path, query, {**headers, "host": settings.behind}, body
        )
        connection = http.client.HTTPConnection(settings.behind, timeout=BEHIND_S)
        connection.request(method, target, body, signed)
        return connection, connection.getresponse()

    def _etag(self, path: str) -> str:
        """The ETag of the object; empty if it does not exist."""
        connection, answer = self._ask("HEAD", path, {}, {}, b"")
        connection.close()
        return answer.getheader("etag", "") if answer.status == 200 else ""

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        headers = _translated(answer.headers, ANSWERED, ANSWERED_OTHERWISE)
        body = b""
        if self.command == "POST":
            body = answer.read()
        etag = headers.get("etag") or _etag_in(body)
        if etag:
            headers["x-goog-generation"] = _generation(etag)
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("content-length", answer.getheader("content-length") or str(len(body)))
        self.end_headers()
        self.wfile.write(body)
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


def _translated(headers: Message, unchanged: set[str], renamed: Mapping[str, str]) -> dict[str, str]:
    lowered = {name.lower(): value for name, value in headers.items()}
    translated = {name: value for name, value in lowered.items() if name in unchanged}
    for old, new in renamed.items():
        translated |= {new + name.removeprefix(old): value for name, value in lowered.items() if name.startswith(old)}
    return translated


def _generation(etag: str) -> str:
    """The generation number for this ETag; 0 for no object."""
    return str(int(hashlib.sha256(etag.strip('"').encode()).hexdigest()[:15], 16)) if etag else "0"


def _etag_in(body: bytes) -> str:
    match = re.search(r"<ETag>(.*?)</ETag>", body.decode())
    return html.unescape(match[1]) if match else ""


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


if __name__ == "__main__":
    with Translator(Settings(**json.loads(Path(sys.argv[1]).read_text()))) as translator:
        translator.serve_forever()
