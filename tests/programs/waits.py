"""Waits until the test writes to a pipe: in Python, in a C call that keeps the GIL, or in one that does not."""

import ctypes
import os
import sys
import threading

import paceline

folder, how = sys.argv[1], sys.argv[2]


def in_thread() -> None:
    threading.Event().wait()


def wait_in_python(fd: int) -> None:
    while os.read(fd, 1) != b"!":
        pass


def wait_in_c(fd: int, library: ctypes.CDLL) -> None:
    count = library.read(fd, ctypes.create_string_buffer(1), 1)
    assert count == 1, "the call was interrupted"


threading.Thread(target=in_thread, daemon=True).start()
pipe = os.open(f"{folder}/{os.environ['PACELINE_TASK']}", os.O_RDONLY)  # waits for the test, too
paceline.report(step=1)
if how == "python" or os.environ["PACELINE_INDEX"] == "0":
    wait_in_python(pipe)
else:
    wait_in_c(pipe, ctypes.PyDLL(None) if os.environ["PACELINE_INDEX"] == "1" else ctypes.CDLL(None))
