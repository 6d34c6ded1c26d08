"""Runs when the interpreter of a task starts: lets the agent see the Python stacks of its threads, on request.

There are two signals, and a file in memory to which both write; agent/tasks/stack_reader.py is the other side.
SAMPLE runs a Python function in the main thread, between two instructions, which writes the stacks of all threads. If
the main thread is in a C call, nothing happens until the call returns: then the agent sends DUMP to threads that do not
run, and faulthandler writes the stack of each. faulthandler would crash the process if the thread ran Python code at
that moment: it reads frames that are being created or cleared (seen with Python 3.9 to 3.13).

Loaded by sitecustomize, in spares too, so it imports only modules that are already loaded.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SAMPLE, DUMP = 55, 56  # real-time signals that no framework uses; SIGRTMAX is 64
NAME = "paceline-stacks"  # of the file, followed by the pid of the process that writes to it
SLOTS = 4096  # the file begins with a table of the native ids of threads, in the slot `id % SLOTS`
SLOT_SIZE = 8  # bytes
REQUEST_AT = SLOTS * SLOT_SIZE  # then follows the number of the agent's request, in one slot
HEAD_SIZE = REQUEST_AT + SLOT_SIZE  # then what the signals write
MOST_BYTES = 256 * 1024  # that SAMPLE writes
MOST_FRAMES = 200  # of a thread, the innermost ones; faulthandler writes 100
_DESCRIPTORS = range(66, 130)  # high numbers, so that a program gets the usual ones

_thread = sys.modules["_thread"]
_get_native_id = _thread.get_native_id
_table = _output = -1
_inode = 0


def note_threads() -> None:
    """Every thread of `threading` calls get_native_id when it starts: then its id is written to the table."""
    vars(_thread)["get_native_id"] = get_native_id
    threading = sys.modules.get("threading")
    if threading is not None:  # a .pth file has imported it
        vars(threading)["get_native_id"] = get_native_id


def get_native_id() -> int:
    """Return a non-negative integer identifying the thread as reported by the OS (kernel)."""
    number: int = _get_native_id()
    try:
        if _is_ours(_table):
            os.pwrite(_table, number.to_bytes(SLOT_SIZE, "little"), number % SLOTS * SLOT_SIZE)
    except OSError:
        pass
    return number


def register() -> None:
    """Once in each process of a task, before its program. Does nothing where that is impossible: the agent finds no
    file, and sends no signal."""
    global _table, _output, _inode
    try:
        import faulthandler  # built in, and already loaded if PYTHONFAULTHANDLER is set

        table = _high(_memory_file())
        os.ftruncate(table, HEAD_SIZE)
        output = _high(os.open(f"/proc/self/fd/{table}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        _table, _output, _inode = table, output, os.fstat(table).st_ino
        faulthandler.register(DUMP, file=output, all_threads=False)
        signals = sys.modules["_signal"]
        signals.signal(SAMPLE, _on_sample)
        signals.siginterrupt(SAMPLE, False)  # system calls of C code are restarted, as with faulthandler
        _withdraw_if_replaced(signals)
    except (ImportError, AttributeError, KeyError, OSError, ValueError, RuntimeError):
        pass


def _withdraw_if_replaced(signals: "Any") -> None:
    """Once the program sets its own handler for one of our signals, the agent must not send them any more."""
    original = signals.signal

    def signal(number: int, handler: "Any", /) -> "Any":
        global _table, _output
        previous = original(number, handler)
        if number in (SAMPLE, DUMP):
            for fd in (_table, _output):
                try:
                    if _is_ours(fd):
                        os.close(fd)
                except OSError:
                    pass
            _table = _output = -1
        return previous

    signal.__doc__ = original.__doc__
    signals.signal = signal


def _on_sample(_: int, frame: "Any") -> None:
    try:
        if _is_ours(_table) and _is_ours(_output):
            request = int.from_bytes(os.pread(_table, SLOT_SIZE, REQUEST_AT), "little")
            text = "\n".join(_stacks(frame)).encode("utf-8", "replace")[:MOST_BYTES]
            os.write(_output, b"Begin %d\n%s\nEnd %d\n" % (request, text, request))
    except Exception:
        pass  # the program must not be affected


def _stacks(main: "Any") -> "Iterator[str]":
    """`main`: the frame that the signal has interrupted, in the main thread."""
    threads = getattr(sys.modules.get("threading"), "_active", {})
    own = _thread.get_ident()
    for ident, innermost in sys._current_frames().items():
        native_id = os.getpid() if ident == own else getattr(threads.get(ident), "native_id", None) or ident
        yield f"Thread {native_id}"
        frame = main if ident == own else innermost
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'.replace("\n", " ")
            frame = frame.f_back


def _is_ours(fd: int) -> bool:
    """The program may have closed the descriptor and reused its number."""
    return fd >= 0 and os.fstat(fd).st_ino == _inode


def _memory_file() -> int:
    name = f"{NAME}-{os.getpid()}"
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    path = f"/tmp/{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd


def _high(fd: int) -> int:
    """Moves a descriptor to a high number."""
    try:
        for number in _DESCRIPTORS:
            try:
                os.fstat(number)
            except OSError:
                return os.dup2(fd, number, inheritable=False)
        raise OSError("no descriptor is free")
    finally:
        os.close(fd)
