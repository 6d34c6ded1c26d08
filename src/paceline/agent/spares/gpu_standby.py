"""A standby: a fork of a spare that has created its CUDA context in advance, and waits to become a task.

A process with a CUDA context cannot be forked, so the spare itself must not create one. Only CUDA's driver is called:
it creates the primary context of the device, which is the one that frameworks use, and no framework is initialized.
"""

import _socket
import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CHECK_S = 1.0  # seconds between two checks of the free memory
_FREE_SHARE = 0.2  # of the memory of the GPU that must be free: a context takes 0.5 GiB, which training may need
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
