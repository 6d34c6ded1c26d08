"""A server process on its own port: started, waited for, stopped, and killed when the tests end."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.stores import kept

HOST = "127.0.0.1"
START_S = 60.0  # Node.js alone takes a second; on a machine that runs all tests, ten seconds have been observed
STOP_S = kept.END_S + 10.0
PAUSE_S = 0.02


class ServerFailed(Exception):
    """A server did not start or did not end; the message names it and ends with its log."""


class Port:
    """A port reserved until it is closed: bound but not listening, so that only a server that we start listens on it.

    Linux lets a second socket with SO_REUSEADDR bind a port as long as none listens on it, and never assigns such a
    port to a socket that binds port 0.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, 0))
        self.number = int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        return f"{HOST}:{self.number}"

    def close(self) -> None:
        self._socket.close()


class Server:
    """A program that listens on one port and stores its data in a folder."""

    def __init__(
        self, name: str, folder: Path, port: Port, command: Sequence[str | Path], env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.port = port
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._command = [str(argument) for argument in command]
        self._env = {**os.environ, **env}
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it answers; does nothing if it is running."""
        if self._keeper and self._keeper.poll() is None:
            return
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", kept.__file__, str(os.getpid()), str(self._folder), *self._command],
                # In its own session: Ctrl-C in the terminal reaches only the tests, which then stop the servers.
                env=self._env, start_new_session=True, cwd=self._folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self._answers():
            if self._keeper.poll() is not None:
                raise ServerFailed(f"{self.name} ended with {self._keeper.returncode}{self._log_tail()}")
            if time.monotonic() > until:
                self.stop()
                raise ServerFailed(f"{self.name} does not answer after {START_S:g} s{self._log_tail()}")
            time.sleep(PAUSE_S)

    def stop(self) -> None:
        """Terminates the server and waits for its end; its data stays."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        keeper.terminate()
        try:
            keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
            raise ServerFailed(f"{self.name} did not end within {STOP_S:g} s{self._log_tail()}") from None

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port.number, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse()  # a refusal is an answer
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    def _log_tail(self) -> str:
        return "\n" + self.log.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def running(folder: Path, *servers: Server) -> Iterator[None]:
    """Starts all servers in this order; afterwards stops them and removes the folder."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        with contextlib.ExitStack() as ending:
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
            for server in servers:
                ending.callback(server.port.close)
                ending.callback(server.stop)
