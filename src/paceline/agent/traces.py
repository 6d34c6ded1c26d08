"""What imports leave behind besides modules: taken back in a spare, done again when the modules are given back."""

import _locale
import gc
import os
import signal
import stat
import sys
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_MISSING = object()
_ATTRIBUTES = (
    ("sys", "excepthook"), ("sys", "displayhook"), ("sys", "unraisablehook"), ("sys", "breakpointhook"),
    ("builtins", "__import__"), ("builtins", "open"), ("warnings", "showwarning"), ("warnings", "formatwarning"),
    ("threading", "excepthook"), ("logging", "_loggerClass"), ("logging", "raiseExceptions"), ("logging", "lastResort"),
)  # fmt: skip


class Watched(dict):  # type: ignore[type-arg]
    """The data of os.environ that remembers which names were read."""

    def __init__(self, data: "dict[bytes, bytes]") -> None:
        super().__init__(data)
        self.reads: set[bytes] = set()

    def __getitem__(self, name: bytes) -> bytes:
        self.reads.add(name)
        found: bytes = super().__getitem__(name)
        return found

    def __contains__(self, name: object) -> bool:
        self.reads.add(name)  # type: ignore[arg-type]
        return super().__contains__(name)


def set_environment(wanted: "dict[str, str]") -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)


def visible() -> "dict[str, Any]":
    """What a program can see of imports without asking for a module."""
    found: dict[str, Any] = {name: list(value) for name, value in _lists().items()}
    for module, name in _ATTRIBUTES:
        found[module + "." + name] = getattr(sys.modules.get(module), name, _MISSING)
    for name, (get, _) in _SETTINGS.items():
        found[name] = get()
    logging = sys.modules.get("logging")
    found["loggers"] = dict(logging.root.manager.loggerDict) if logging else {}
    found["level"] = logging.root.level if logging else _MISSING
    return found


def show(wanted: "dict[str, Any]") -> None:
    """The interpreter as it was when `wanted` was taken."""
    change(visible(), wanted)


def change(before: "dict[str, Any]", after: "dict[str, Any]") -> None:
    """Does once more what changed `before` to `after`, whatever the program has done to the rest meanwhile."""
    for name, items in _lists().items():
        old, new = before.get(name, []), after.get(name, [])
        if old != new:
            _change_list(items, old, new)
            if items is warnings.filters:
                _filters_changed()
    for module, name in _ATTRIBUTES:
        old, new = before[module + "." + name], after[module + "." + name]
        if old is not new and old is not _MISSING and new is not _MISSING:
            setattr(sys.modules[module], name, new)
    for name, (_, put) in _SETTINGS.items():
        if before[name] != after[name]:
            put(after[name])
    logging = sys.modules.get("logging")
    if logging:
        loggers = logging.root.manager.loggerDict
        for name in before["loggers"].keys() - after["loggers"].keys():
            loggers.pop(name, None)
        for name in after["loggers"].keys() - before["loggers"].keys():
            loggers.setdefault(name, after["loggers"][name])
        if before["level"] is not _MISSING and after["level"] not in (_MISSING, before["level"]):
            logging.root.setLevel(after["level"])


def _lists() -> "dict[str, list[Any]]":
    logging = sys.modules.get("logging")
    return {
        "meta_path": sys.meta_path,
        "path_hooks": sys.path_hooks,
        "filters": warnings.filters,
        "handlers": logging.root.handlers if logging else [],
    }


def _filters_changed() -> None:
    """Tells the C part of warnings; what does so has had several names."""
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):
        mutated = getattr(warnings, name, None)
        if mutated is not None:
            with getattr(warnings, "_lock", None) or _Nothing():
                mutated()
            return


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _change_list(items: "list[Any]", old: "list[Any]", new: "list[Any]") -> None:
    """Imports add at the front or at the end; anything else is done as it was."""
    for item in [item for item in old if item not in new]:
        if item in items:
            items.remove(item)
    kept = [item for item in old if item in new]
    at = next((at for at in range(len(new) - len(kept) + 1) if new[at : at + len(kept)] == kept), None)
    if at is None:
        items[:] = new if items == old else [item for item in new if item not in old] + items
        return
    front, back = new[:at], new[at + len(kept) :]
    items[:] = front + [item for item in items if item not in front and item not in back] + back


_SETTINGS: "dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]" = {
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "switch": (sys.getswitchinterval, sys.setswitchinterval),
    "gc": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "thresholds": (gc.get_threshold, lambda values: gc.set_threshold(*values)),
    "locale": (lambda: _locale.setlocale(_locale.LC_ALL, None), lambda name: _locale.setlocale(_locale.LC_ALL, name)),
}


class Process:
    """What has to be the same after the imports as before, for a fork of the process to be sound."""

    def __init__(self) -> None:
        self.cwd = os.getcwd()
        self.umask = _umask()
        self.streams = (sys.stdin, sys.stdout, sys.stderr)
        self.signals = _signals()
        self.fds = set(_fds())

    def changes(self, threads: "Callable[[], int]") -> "tuple[str, set[int]]":
        """Why forks would not be sound, or an empty string; and the file descriptors that belong to modules."""
        kept = set(_fds()) - self.fds
        if sys.modules["_thread"]._count() or _python_threads() > 1:
            return "an import started a Python thread", kept
        if _children():
            return "an import started a process", kept
        if (sys.stdin, sys.stdout, sys.stderr) != self.streams:
            return "an import replaced a standard stream", kept
        if _signals() != self.signals:
            return "an import set a signal handler", kept
        if os.getcwd() != self.cwd or _umask() != self.umask:
            return "an import changed the working folder or the umask", kept
        for fd in kept:
            if not _shareable(fd):
                return f"an import opened {_fds().get(fd)}", kept
        if threads() > 1:
            _fork_once()  # libraries that know about fork (OpenBLAS) end their threads before one
        if threads() > 1:
            return "an import started a native thread", kept
        return "", kept


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def _signals() -> "list[object]":
    return [signal.getsignal(number) for number in range(1, signal.NSIG) if number not in (32, 33)]


def _fds() -> "dict[int, str]":
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
    return found


def _shareable(fd: int) -> bool:
    if _fds().get(fd) in _HARMLESS:
        return True
    with open(f"/proc/self/fdinfo/{fd}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    return stat.S_ISREG(os.fstat(fd).st_mode) and flags & os.O_ACCMODE == os.O_RDONLY


def _python_threads() -> int:
    threading = sys.modules.get("threading")
    return int(threading.active_count()) if threading else 1


def _children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _fork_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
