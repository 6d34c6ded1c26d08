"""Runs when Python starts with this folder on PYTHONPATH: prepares the interpreter for Paceline."""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _load(*parts: str):  # type: ignore[no-untyped-def]
    """Load a module of Paceline from its file, without adding it to sys.modules."""
    path = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), *parts)
    name = "paceline " + parts[-1]
    loader = type(__spec__.loader)(name, path)  # type: ignore
    module = type(sys)(name)
    module.__file__ = path
    loader.exec_module(module)
    return module


def _start() -> None:
    """Prepare the interpreter, then import the sitecustomize that this one hides.

    If there is none, the ImportError reaches `site`, which expects it.
    """
    sys.path[:] = [path for path in sys.path if path != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    settings = os.environ.pop("PACELINE_STARTER", None)
    mode, fd, python_path = settings.split(" ", 2) if settings is not None else ("", "-1", "")
    if python_path:
        os.environ["PYTHONPATH"] = python_path[1:]
    elif mode:
        del os.environ["PYTHONPATH"]
    try:
        if mode or os.environ.get("PACELINE_JAX_COORDINATOR") or os.environ.get("PACELINE_PATCH_KERAS"):
            starter = _load("agent", "spares", "import_recorder.py")
            starter.begin(mode, int(fd), starter, _load)
        elif os.environ.get("PACELINE_TASK"):
            stack_signal = _load("frameworks", "stack_signal.py")
            stack_signal.note_threads()
            stack_signal.register()
    except KeyboardInterrupt:
        raise  # Ctrl-C: Python ends, as it would at any other import
    except BaseException as error:
        os.write(2, f"paceline: cannot prepare this interpreter: {error!r}\n".encode())
        if mode == "spare":  # Python would run the program in a process that is not a task
            os._exit(1)
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")


_start()
