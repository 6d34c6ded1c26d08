"""Runs before a program where this folder is on PYTHONPATH: starts what Paceline needs there, then hands over."""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _load(*parts: str):  # type: ignore[no-untyped-def]
    """A module of ours by its file, kept out of sys.modules."""
    path = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), *parts)
    name = "paceline " + parts[-1]
    loader = type(__spec__.loader)(name, path)  # type: ignore
    module = type(sys)(name)
    module.__file__ = path
    loader.exec_module(module)
    return module


def _hand_over() -> None:
    """The sitecustomize that ours hides is imported in its place; where there is none, `site` is told so."""
    sys.path[:] = [path for path in sys.path if path != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    words = os.environ.pop("PACELINE_STARTER", None)
    mode, fd, python_path = words.split(" ", 2) if words is not None else ("", "-1", "")
    if python_path:
        os.environ["PYTHONPATH"] = python_path[1:]
    elif mode:
        del os.environ["PYTHONPATH"]
    try:
        if mode or os.environ.get("PACELINE_JAX_COORDINATOR") or os.environ.get("PACELINE_PATCH_KERAS"):
            starter = _load("agent", "starter.py")
            starter.begin(mode, int(fd), starter, _load)
    except BaseException as error:
        os.write(2, f"paceline: cannot prepare this interpreter: {error!r}\n".encode())
        if mode == "spare":  # Python would go on to the program, in a process that is no task
            os._exit(1)
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")


_hand_over()
