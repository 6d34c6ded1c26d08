"""A standby: a fork of a spare that has created its CUDA context in advance, and waits to become a task.

A process with a CUDA context cannot be forked, so the spare itself must not create one. Only CUDA's driver is called:
it creates the primary context of the device, which is the one that frameworks use, and no framework is initialized. If
the program uses NCCL, a communicator of this process alone is created and destroyed: the first one of a process takes
0.35 s, of which 0.31 s are for loading NCCL's kernels.
"""

import _socket
import ctypes
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NCCL_WITHIN = 20  # seconds
_CHECK_S = 1.0  # seconds between two checks of the free memory
_FREE_SHARE = 0.2  # of the memory of the GPU that must be free: a context takes 0.5 GiB, which training may need
_NCCL_THREADS = (b"pt_nccl_", b"NCCL ")  # how the names of threads of torch and NCCL begin if there is a communicator
_COMPUTE_MODE, _DEFAULT_MODE = 20, 0  # an attribute of a device: in other modes only one process may use it


class Unavailable(Exception):
    """There is no context: the task must create it itself."""


class Context:
    def __init__(self, library: str, device: int) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise Unavailable(str(error)) from None
        handle, mode, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, handle)
        if mode.value != _DEFAULT_MODE:
            raise Unavailable("only one process may use the GPU")
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: "Any") -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise Unavailable(f"{name}: error {code}")

    def has_room(self) -> bool:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value >= _FREE_SHARE * total.value

    def leave(self) -> None:
        """The context stays, but is not the current one, as in a new process."""
        self._call("cuCtxSetCurrent", None)


def wait(
    link: "_socket.socket", order: "dict[str, Any]", receive: "Callable[[_socket.socket], tuple[bytes, list[int]]]"
) -> "tuple[list[int], set[int]]":
    """Returns once this process is to become a task: the descriptors that came with the request, and those of CUDA.

    Exits if there can be no context, if the spare ends, or if training needs the memory. `order`: see ContextOrder.
    """
    if order["file"] not in _open_files(order["pid"]).values():
        os._exit(1)  # the program uses the GPU in other processes, which it starts
    os.environ.update(order["environment"])
    before = set(_open_files("self"))
    try:
        context = Context(order["library"], order["device"])
        if not context.has_room():
            os._exit(1)
        if order["nccl"] and _uses_nccl(order["pid"]):
            signal.alarm(_NCCL_WITHIN)  # ends this process
            try:
                load_nccl()
            except Exception:
                pass  # another version: the task loads it itself
            signal.alarm(0)
        cuda_fds = set(_open_files("self")) - before
        link.settimeout(_CHECK_S)
        while True:
            if not context.has_room():
                os._exit(1)
            try:
                data, fds = receive(link)
            except _socket.timeout:
                continue
            if not data:
                os._exit(1)
            context.leave()
            link.send(b"here")
            return fds, cuda_fds
    except (Unavailable, OSError):
        os._exit(1)


def _uses_nccl(pid: int) -> bool:
    """Whether the process has a communicator; a framework loads the library even if it does not use it."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/comm", "rb") as file:
                if file.read().startswith(_NCCL_THREADS):
                    return True
        except OSError:
            continue  # the thread has ended
    return False


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def load_nccl() -> bool:
    """Loads NCCL's kernels into the current context, if a framework has loaded the library. Whether it succeeded."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        paths = [line.split(None, 5)[-1].strip() for line in file if "/libnccl.so" in line]
    if not paths:
        return False
    library, identity, communicator = ctypes.CDLL(paths[0]), _UniqueId(), ctypes.c_void_p()
    if library.ncclGetUniqueId(ctypes.byref(identity)):
        return False
    library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
    if library.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0):
        return False
    return not library.ncclCommDestroy(communicator)


def _open_files(pid: "int | str") -> "dict[int, str]":
    """The open files of a process by descriptor; without that of the listing itself, which is closed by then."""
    files = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                files[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                pass
    except OSError:
        pass
    return files
