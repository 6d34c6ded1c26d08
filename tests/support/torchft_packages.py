"""torchft for tests, in a folder of its own, and its lighthouse, through which replicas find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.environment import without
from support.lab.places import PROJECT, cache, key, made_once
from support.ports import free_port
from support.runs import SOURCE, eventually

REQUIREMENTS = PROJECT / "requirements" / "torchft.txt"


def python_path() -> str:
    """With which a program can import torchft. torch is the one that is installed."""

    def build(folder: Path) -> None:
        target = folder / "site-packages"  # by this name, spares know that it contains installed packages
        install = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", f"--requirements={REQUIREMENTS}"]
        uv = [PROJECT / ".tools/bin/uv", *install, f"--python={sys.executable}", f"--target={target}"]
        result = subprocess.run(uv, stderr=subprocess.PIPE, text=True, timeout=500)
        if "no version of torchft-nightly" in result.stderr:  # indexes delete such versions after some time
            pytest.skip(f"the package index no longer has the pinned version of torchft-nightly: {result.stderr}")
        assert result.returncode == 0, result.stderr

    folder = made_once(cache().parent / f"paceline-torchft-{key(REQUIREMENTS.read_bytes(), sys.version)}", build)
    return f"{SOURCE}{os.pathsep}{folder / 'site-packages'}"


@contextmanager
def lighthouse(log: Path) -> Iterator[str]:
    """The address of a lighthouse."""
    port = free_port()
    env = {**without("PACELINE", "PYTEST", "TORCHFT"), "PYTHONPATH": python_path()}
    with log.open("wb") as output:
        server = subprocess.Popen([sys.executable, "-c", _LIGHTHOUSE, str(port)], env=env, stdout=output, stderr=output)
    try:
        eventually("the lighthouse listens", lambda: b"address" in log.read_bytes(), 120, log.read_text)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


_LIGHTHOUSE = """
import sys, threading
from torchft.coordination import LighthouseServer
server = LighthouseServer(f"127.0.0.1:{sys.argv[1]}", min_replicas=1, join_timeout_ms=10000, heartbeat_timeout_ms=5000)
print("address", server.address(), flush=True)
threading.Event().wait()
"""
