"""Copies files from the pod of a member, with a program in that pod."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod

from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.api.owners import controller
from paceline.backends.kubernetes.api.pod_exec import Program
from paceline.backends.kubernetes.objects import names, pods
from paceline.backends.kubernetes.runs.local_folder import connect_for
from paceline.backends.kubernetes.runs.pod_records import INDEX_LABEL
from paceline.errors import PacelineError
from paceline.plan import Plan
from paceline.view.files.plan_files import read_plan

SILENCE_S = 60.0  # seconds without data after which a copy fails
START_S = 60.0  # seconds for the start of the programs that read the files of a host
LEAST_RATE = 512 * 1024  # bytes per second, of the files; they are sent compressed
_READ = """
import os, sys, zlib
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
pack = zlib.compressobj(1)
with open(fd, "rb") as file, open(1, "wb") as out:
    while True:
        data = file.read(1 << 20)
        if not data:
            break
        out.write(pack.compress(data))
    out.write(pack.flush())
"""


def fetch(folder: Path, host: str, below: str, files: Mapping[str, int], to: Path) -> None:
    """Copies files of a host. `folder`: the local one of the run. `below`: the folder of the files, in the run's folder
    in the pod. `files`: their paths and sizes. PacelineError: a file cannot be copied."""
    with closing(connect_for(folder)) as cluster:
        _fetch(cluster, folder, host, below, files, to)


def _fetch(cluster: Cluster, folder: Path, host: str, below: str, files: Mapping[str, int], to: Path) -> None:
    pod, container = _pod(cluster, folder.name, read_plan(folder), host)
    deadline = Deadline(START_S + sum(files.values()) / LEAST_RATE)
    for path, size in files.items():
        target = to / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            with closing(Program(cluster, pod, container, command(f"{pods.RUN_FOLDER}/{below}/{path}"))) as program:
                _receive(program, partial, size, deadline)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def command(path: str) -> list[str]:
    return ["/bin/sh", "-c", f'{pods.EXEC_PYTHON} -I -c "$@"; done; exit 1', "sh", _READ, path]


class Deadline:
    """For all files of a host: a pod that sends a few bytes at a time is never silent."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at = seconds, time.monotonic() + seconds

    def next_wait(self, name: str) -> float:
        """How long to wait for data. PacelineError: the time is over."""
        remaining = self._at - time.monotonic()
        if remaining <= 0:
            raise PacelineError(f"{name}: its pod did not send the files of its host within {self._seconds:.0f} s")
        return min(SILENCE_S, remaining)


def _receive(program: Program, target: Path, size: int, deadline: Deadline) -> None:
    """Writes at most `size` bytes, however much the pod sends."""
    unpacker, buffer = zlib.decompressobj(), bytearray(65536)
    view, name = memoryview(buffer), target.name[1:].removesuffix(".partial")
    with target.open("wb") as file:
        while not unpacker.eof:
            wait = deadline.next_wait(name)
            try:
                program.settimeout(wait)
                count = program.recv_into(view, len(buffer))
                data = unpacker.decompress(bytes(view[:count]), size + 1 - file.tell())
            except TimeoutError:
                if wait == SILENCE_S:
                    raise PacelineError(f"{name}: its pod sent nothing for {SILENCE_S:g} s") from None
                continue  # the deadline has passed
            except (OSError, zlib.error) as error:  # the program has ended
                raise PacelineError(f"{name}: {error}") from None
            file.write(data)
            if file.tell() > size:
                break
        if file.tell() != size:
            raise PacelineError(f"the file does not have {size} bytes")


def _pod(cluster: Cluster, run: str, plan: Plan, host: str) -> tuple[str, str]:
    """The running pod of a host and its container. Others may create pods with the same labels."""
    pool = next(pool for pool in names.pools(plan) if host in [each.name for each in pool.hosts])
    index = [each.name for each in pool.hosts].index(host)
    name = names.job_of(run, pool)
    job = cluster.find(Job, name)
    labels: dict[str, Any] = {names.RUN_LABEL: run, names.ROLE_LABEL: pool.role, INDEX_LABEL: str(index)}
    listed: list[Any] = cluster.request("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    for pod in listed:
        is_own = job is not None and controller(pod) == str(job.metadata.uid)
        if is_own and pod.status and pod.status.phase == "Running" and not pod.metadata.deletionTimestamp:
            return str(pod.metadata.name), pool.role
    raise PacelineError(f"no pod of {host} is running")
