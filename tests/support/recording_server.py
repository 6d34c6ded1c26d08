"""An object store without objects, on loopback, that records the requests which it receives, with all headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.loopback_server import LoopbackServer, SilentHandler

EMPTY_LISTING = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Recorder(LoopbackServer):
    def __init__(self) -> None:
        self.requests: list[str] = []  # method and path, then the headers
        server = self

        class Handler(SilentHandler):
            def _answer(self) -> None:
                server.requests.append(f"{self.command} {self.path}\n{self.headers}")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200 if "list-type" in self.path else 404)
                body = EMPTY_LISTING if "list-type" in self.path else b""
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _answer

        super().__init__(Handler)


@contextmanager
def recording() -> Iterator[Recorder]:
    server = Recorder()
    try:
        yield server
    finally:
        server.close()
