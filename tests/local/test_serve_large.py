"""Large requests of the model server, which another process reads and writes."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.serve.app import Limits
from paceline.serve.json_process import JsonProcess, TooComplex
from paceline.serve.signatures import BadRequest
from support.in_process_server import ANSWER, SIGNATURE, running
from support.runs import eventually

KNOWN = {"serving_default": SIGNATURE}
ROWS = 50_000
LARGE = b'{"instances": [' + b",".join([b"[1,2]"] * ROWS) + b"]}"


def test_while_a_large_request_is_read_others_are_answered() -> None:
    with running(Limits(seconds=60)) as server, ThreadPoolExecutor(1) as client:
        expected = b'{"predictions":[' + b",".join([b"[1.0,2.0]"] * ROWS) + b"]}"
        assert server.predict(LARGE).endswith(expected)
        process = server.app._json._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)  # it cannot finish before it is told to
        try:
            large = client.submit(server.predict, LARGE)
            eventually("the request is received", lambda: server.app._memory.used > len(LARGE) / 2)
            assert server.predict().endswith(ANSWER)
            assert not large.done()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert large.result(120).endswith(expected)
        assert b"HTTP/1.1 400 " in (reply := server.predict(LARGE[:-1]))
        assert b"the body is not valid JSON" in reply
    assert process.wait(60) != 0  # killed with the server


def test_a_request_that_needs_too_much_memory_is_refused_and_the_next_one_is_answered() -> None:
    async def check() -> None:
        process = JsonProcess(400 * 1024 * 1024)
        try:
            bomb = b'{"instances": [' + b",".join([b"[[]]"] * 4_000_000) + b"]}"
            with pytest.raises(TooComplex, match="needs too much memory"):
                await process.call("parse", bomb, KNOWN)
            inputs = await process.call("parse", LARGE, KNOWN)
            assert inputs.rows == ROWS and inputs.arrays["x"].shape == (ROWS, 2)
            with pytest.raises(BadRequest, match="not valid JSON"):
                await process.call("parse", b"{", KNOWN)
        finally:
            process.close()

    asyncio.run(check())
