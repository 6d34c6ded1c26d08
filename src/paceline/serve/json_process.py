"""A process that reads and writes large JSON, while the server answers other requests.

A thread would not do: the JSON library and numpy hold Python's global lock for the whole body, seconds for 32 MiB. The
process also has a memory limit of its own: parsed JSON can take 20 times the memory of its text.
"""

from __future__ import annotations

import asyncio
import os
import pickle  # only between the server and its own child, over private pipes
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from paceline.frameworks.python_start import module_command
from paceline.serve import request_json
from paceline.serve.signatures import BadRequest

MOST_MEMORY = 2 * 1024 * 1024 * 1024
_FUNCTIONS: dict[str, Callable[..., Any]] = {"parse": request_json.parse, "encode": request_json.encode}


class TooComplex(Exception):
    """The body needs more memory than allowed."""


class JsonProcess:
    """Starts its process with the first call: most servers get no large requests."""

    def __init__(self, most_memory: int = MOST_MEMORY) -> None:
        """`most_memory`: bytes that the process may use."""
        self._most_memory = most_memory
        self._thread = ThreadPoolExecutor(1, "json")
        self._process: subprocess.Popen[bytes] | None = None

    async def call(self, function: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, function, args)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()

    def _call(self, function: str, args: Any) -> Any:
        if self._process is None:
            self._process = _start(self._most_memory)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump((function, args), self._process.stdin, protocol=5)
            self._process.stdin.flush()
            result = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._end()
            raise TooComplex("reading or writing it as JSON needs too much memory") from None
        if isinstance(result, MemoryError):
            raise TooComplex("reading or writing it as JSON needs too much memory")
        if isinstance(result, Exception):
            raise result
        return result

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        with process:  # closes its pipes and waits for it
            pass


def _start(most_memory: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = module_command(sys.executable, "paceline.serve.json_process", str(most_memory))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def main() -> None:
    """Answers calls until the server closes the pipe, also by its death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which answers pending requests
    most_memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most_memory, most_memory))
    output: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = _FUNCTIONS[function](*args)
        except (BadRequest, MemoryError) as error:
            result = error
        except Exception as error:
            result = BadRequest(f"{type(error).__name__}: {error}")
        pickle.dump(result, output, protocol=5)
        output.flush()
        del args, result


if __name__ == "__main__":
    main()
