"""Standbys: forks of a spare with a CUDA context. A library of our own stands for CUDA, since there is no GPU here."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from paceline.agent.spares.spare import ContextOrder, Spare
from support.spare_processes import (
    DEADLINE,
    LATE,
    SLOW_IMPORT,
    STATIC,
    Warm,
    recorded,
    write,
)
from support.spare_processes import nothing_left as nothing_left
from support.spare_processes import parent_of_orphans as parent_of_orphans

CUDA = """
    #include <fcntl.h>
    #include <pthread.h>
    #include <stddef.h>
    #include <stdlib.h>
    #include <unistd.h>
    static int fd = -1;
    static void *idle(void *nothing) { for (;;) pause(); }
    int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 0 : 100; }
    int cuDeviceGet(int *handle, int device) { *handle = device; return device == 0 ? 0 : 101; }
    int cuDeviceGetAttribute(int *value, int attribute, int handle) {
        *value = atoi(getenv("CUDA_MODE")); return attribute == 20 ? 0 : 1;
    }
    int cuDevicePrimaryCtxRetain(void **context, int handle) {
        pthread_t thread;
        fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
        *context = &fd;
        return pthread_create(&thread, NULL, idle, NULL);
    }
    int cuCtxSetCurrent(void *context) { return context == NULL || context == &fd ? 0 : 201; }
    int cuMemGetInfo_v2(size_t *free, size_t *total) { *total = 100; *free = atoi(getenv("CUDA_FREE")); return 0; }
    int context_fd() { return fd; }
"""
CUDA_TASK = """
    import ctypes, os, sys
    import json
    fd = ctypes.CDLL(sys.argv[1]).context_fd()
    print(fd >= 0 and os.readlink(f"/proc/self/fd/{fd}"), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["RANK"])
    links = [f"/proc/self/fd/{number}" for number in range(4, 256)]
    files = [os.readlink(link) for link in links if os.path.islink(link)]
    print([file for file in files if f"paceline-stacks-{os.getpid()} " not in file])
"""
NCCL = """
    #include <stdlib.h>
    typedef struct { char bytes[128]; } unique_id;
    static int created, destroyed;
    int ncclGetUniqueId(unique_id *id) { id->bytes[127] = 7; return 0; }
    int ncclCommInitRank(void **communicator, int count, unique_id id, int rank) {
        *communicator = &created;
        return created++ || count != 1 || rank || id.bytes[127] != 7 || !getenv("NCCL_DEBUG");
    }
    int ncclCommDestroy(void *communicator) { return communicator != &created || destroyed++; }
    int ready() { return created && destroyed; }
"""
CUDA_VARIABLES = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MODE": "0", "CUDA_FREE": "50"}
USES_CUDA = "/dev/full"  # stands for the device that a process with a context has open


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the functions of CUDA's driver that a standby calls."""
    folder = tmp_path_factory.mktemp("cuda")
    source = write(folder / "cuda.c", CUDA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "cuda.so", source, "-lpthread"], check=True, timeout=60)
    return str(folder / "cuda.so")


def standbys_of(spare: Spare) -> list[psutil.Process]:
    standbys = []
    for each in psutil.Process(spare.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if each.num_threads() > 1:
                standbys.append(each)
    return standbys


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long  # needs a C compiler
@pytest.mark.parametrize("times", [1, 2])
def test_a_standby_with_a_context_becomes_the_task(tmp_path: Path, cuda: str, times: int) -> None:
    write(tmp_path / "train.py", CUDA_TASK)
    command = ["python", "train.py", cuda]
    record = recorded(command, tmp_path, {**STATIC, **LATE, **CUDA_VARIABLES})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record) as warm:
        for number in range(times):
            for name in ("one", "other"):
                warm.spare.prepare(name, ContextOrder(CUDA_VARIABLES, 0, os.getpid(), False, cuda, USES_CUDA))
            wait_for(lambda: len(standbys_of(warm.spare)) == 2)
            waiting = {each.pid for each in standbys_of(warm.spare)}
            for name in ("one", "other"):
                pid, streams = warm.begin({**STATIC, **LATE, **CUDA_VARIABLES, "RANK": str(number)}, standby=name)
                ended = streams.end(pid)
                assert ended.out == f"/dev/zero 0 {number}\n['/dev/zero']\n", ended
                assert ended.code == 0
                assert pid in waiting
        ended = warm.run({**STATIC, **LATE, **CUDA_VARIABLES})
        assert ended.out == "False 0 1\n[]\n", "a task without a standby has no context"


@pytest.mark.long  # needs a C compiler
@pytest.mark.parametrize(("requested", "used", "ready"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_a_standby_has_loaded_nccl_if_the_program_uses_it(
    tmp_path: Path, cuda: str, requested: bool, used: bool, ready: int
) -> None:
    """This process stands for the task: it has a thread with the name that NCCL gives to its own."""
    source, library = write(tmp_path / "nccl.c", NCCL), tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    site = tmp_path / "lib" / "site-packages"
    write(site / "framework.py", f"{SLOW_IMPORT}\nimport ctypes\nnccl = ctypes.CDLL({str(library)!r})")
    write(tmp_path / "train.py", "import framework\nprint(framework.nccl.ready())")
    command = ["python", "train.py"]
    variables = {**CUDA_VARIABLES, "NCCL_DEBUG": "WARN"}
    env = {**STATIC, "PYTHONPATH": str(site)}
    record = recorded(command, tmp_path, {**env, **LATE, **variables})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record, env) as warm, ExitStack() as thread:
        if used:
            thread.enter_context(thread_named("pt_nccl_watchdg"))
        warm.spare.prepare("one", ContextOrder(variables, 0, os.getpid(), requested, cuda, USES_CUDA))
        pid, streams = warm.begin({**env, **LATE, **variables}, standby="one")
        assert streams.end(pid).out == f"{ready}\n"


@contextmanager
def thread_named(name: str) -> Iterator[None]:
    ended, begun = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        begun.set()
        ended.wait(DEADLINE)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(DEADLINE)
    yield
    ended.set()
    thread.join()


@pytest.mark.long  # needs a C compiler
@pytest.mark.parametrize(
    ("variables", "device", "used"),
    [
        ({"CUDA_FREE": "9"}, 0, USES_CUDA),
        ({"CUDA_MODE": "3"}, 0, USES_CUDA),
        ({}, 1, USES_CUDA),
        ({}, 0, "/dev/nvidia-uvm"),
    ],
    ids=["training needs the memory", "one process per GPU", "no such device", "the program does not use CUDA"],
)
def test_a_standby_that_cannot_be_of_use_ends(
    tmp_path: Path, cuda: str, variables: dict[str, str], device: int, used: str
) -> None:
    write(tmp_path / "train.py", CUDA_TASK)
    command = ["python", "train.py", cuda]
    record = recorded(command, tmp_path, {**STATIC, **LATE, **CUDA_VARIABLES})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record) as warm:
        warm.spare.prepare("one", ContextOrder({**CUDA_VARIABLES, **variables}, device, os.getpid(), False, cuda, used))
        pid, streams = warm.begin({**STATIC, **LATE, **CUDA_VARIABLES}, standby="one")
        assert streams.end(pid).out == "False 0 1\n[]\n"


@pytest.mark.long  # needs a C compiler
def test_standbys_end_with_their_spare(tmp_path: Path, cuda: str) -> None:
    write(tmp_path / "train.py", CUDA_TASK)
    command = ["python", "train.py", cuda]
    record = recorded(command, tmp_path, {**STATIC, **LATE, **CUDA_VARIABLES})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record) as warm:
        for name in ("one", "other"):
            warm.spare.prepare(name, ContextOrder(CUDA_VARIABLES, 0, os.getpid(), False, cuda, USES_CUDA))
        wait_for(lambda: len(standbys_of(warm.spare)) == 2)
        standbys = standbys_of(warm.spare)
        os.kill(warm.spare.pid, signal.SIGKILL)
        assert psutil.wait_procs(standbys, DEADLINE)[1] == []
