"""An object store without objects, on loopback, that records the requests which it receives, with all headers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EMPTY_LISTING = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Recorder:
    def __init__(self) -> None:
        self.requests: list[str] = []  # method and path, then the headers
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                server.requests.append(f"{self.command} {self.path}\n{self.headers}")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200 if "list-type" in self.path else 404)
                body = EMPTY_LISTING if "list-type" in self.path else b""
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@contextmanager
def recording() -> Iterator[Recorder]:
    server = Recorder()
    try:
        yield server
    finally:
        server.close()
