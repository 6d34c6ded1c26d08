"""Side effects of imports: undone in a spare, and replayed in a task when its program imports the modules."""

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


class RecordingEnvironment(dict):  # type: ignore[type-arg]
    """The data of os.environ; records which names are read."""

    def __init__(self, data: "dict[bytes, bytes]") -> None:
        super().__init__(data)
        self.reads: set[bytes] = set()

    def __getitem__(self, name: bytes) -> bytes:
        self.reads.add(name)
        value: bytes = super().__getitem__(name)
        return value

    def __contains__(self, name: object) -> bool:
        self.reads.add(name)  # type: ignore[arg-type]
        return super().__contains__(name)


def set_environment(variables: "dict[str, str]") -> None:
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


def capture_state() -> "dict[str, Any]":
    """The state of the interpreter that imports can change, other than sys.modules."""
    state: dict[str, Any] = {name: list(value) for name, value in _lists().items()}
    for module, name in _ATTRIBUTES:
        state[module + "." + name] = getattr(sys.modules.get(module), name, _MISSING)
    for name, (get, _) in _SETTINGS.items():
        state[name] = get()
    logging = sys.modules.get("logging")
    state["loggers"] = dict(logging.root.manager.loggerDict) if logging else {}
    state["level"] = logging.root.level if logging else _MISSING
    return state


def restore_state(state: "dict[str, Any]") -> None:
    replay_changes(capture_state(), state)


def replay_changes(before: "dict[str, Any]", after: "dict[str, Any]") -> None:
    """Applies the changes from `before` to `after` again, and keeps all other changes that the program has made."""
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
    """Notifies the C part of the warnings module; the function for this has several names, depending on the version."""
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
    """Imports usually add items at the front or at the end; any other change replaces the list."""
    for item in [item for item in old if item not in new]:
        if item in items:
            items.remove(item)
    common = [item for item in old if item in new]
    at = next((at for at in range(len(new) - len(common) + 1) if new[at : at + len(common)] == common), None)
    if at is None:
        items[:] = new if items == old else [item for item in new if item not in old] + items
        return
    front, back = new[:at], new[at + len(common) :]
    items[:] = front + [item for item in items if item not in front and item not in back] + back


_SETTINGS: "dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]" = {
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "switch": (sys.getswitchinterval, sys.setswitchinterval),
    "gc": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "thresholds": (gc.get_threshold, lambda values: gc.set_threshold(*values)),
    "locale": (lambda: _locale.setlocale(_locale.LC_ALL, None), lambda name: _locale.setlocale(_locale.LC_ALL, name)),
}


class Process:
    """The state of the process that imports must not change, so that it can be forked safely."""

    def __init__(self) -> None:
        self.cwd = os.getcwd()
        self.umask = _umask()
        self.streams = (sys.stdin, sys.stdout, sys.stderr)
        self.signals = _signals()
        self.fds = set(_fds())

    def unshareable_fds(self) -> "list[int]":
        """The file descriptors that modules opened and that forks cannot share."""
        return [fd for fd in _fds() if fd not in self.fds and not _is_shareable(fd)]

    def changes(self, threads: "Callable[[], int]") -> "tuple[str, set[int]]":
        """Why the process cannot be forked safely, or an empty string; and the file descriptors that modules opened."""
        module_fds = set(_fds()) - self.fds
        if sys.modules["_thread"]._count() or _python_threads() > 1:
            return "an import started a Python thread", module_fds
        if _has_children():
            return "an import started a process", module_fds
        if (sys.stdin, sys.stdout, sys.stderr) != self.streams:
            return "an import replaced a standard stream", module_fds
        if _signals() != self.signals:
            return "an import set a signal handler", module_fds
        if os.getcwd() != self.cwd or _umask() != self.umask:
            return "an import changed the working folder or the umask", module_fds
        for fd in module_fds:
            if not _is_shareable(fd):
                return f"an import opened {_fds().get(fd)}", module_fds
        if threads() > 1:
            _fork_once()  # libraries with fork handlers (OpenBLAS) end their threads before a fork
        if threads() > 1:
            return "an import started a native thread", module_fds
        return "", module_fds


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _signals() -> "list[object]":
    return [signal.getsignal(number) for number in range(1, signal.NSIG) if number not in (32, 33)]


def _fds() -> "dict[int, str]":
    """The target of each open file descriptor."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
    return targets


def _is_shareable(fd: int) -> bool:
    """Whether a fork may use the descriptor, too: a read-only file, or a device such as /dev/null."""
    if _fds().get(fd) in _HARMLESS:
        return True
    with open(f"/proc/self/fdinfo/{fd}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    return stat.S_ISREG(os.fstat(fd).st_mode) and flags & os.O_ACCMODE == os.O_RDONLY


def _python_threads() -> int:
    threading = sys.modules.get("threading")
    return int(threading.active_count()) if threading else 1


def _has_children() -> bool:
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
