"""Runs in a task's interpreter before its program: records what it imports, or makes the interpreter a spare.

frameworks/site/sitecustomize.py loads it while Python starts; Python itself then runs the program, as if nothing had
been here. It is part of every start, so it imports nothing that is not there yet.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

STANDARD, SITE, OWN, UNKNOWN = "standard", "site", "own", "unknown"

_bootstrap = sys.modules["_frozen_importlib"]
_thread = sys.modules["_thread"]
_now = sys.modules["time"].monotonic
_STANDARD_FOLDER = os.path.dirname(os.__file__) + os.sep
_SITE_FOLDERS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Where a variable is set, a module of ours is told of one that the program imports, as soon as it is there.
_TOLD = {
    "PACELINE_JAX_COORDINATOR": ("jax._src.clusters", "jax_cluster.py"),
    "PACELINE_PATCH_KERAS": ("keras", "keras_fit.py"),
}
_MOST_MODULES = 20_000
_UNWRITTEN_S = 0.02  # what a task that is killed may leave unrecorded, in time of imports
_BETWEEN_COUNTS_S = 0.001
_LAST_TURN_S = 0.05


def begin(mode: str, fd: int, starter: "Any", load: "Callable[..., Any]") -> None:
    """Returns where the program may begin; in a spare, that is once in every task forked from it."""
    tell_of_errors()
    let_threads_finish()
    if mode == "spare":
        load("agent", "preload.py").serve(fd, starter, load)
        return
    if fd >= 0 and hasattr(_bootstrap, "_module_locks"):
        os.set_inheritable(fd, False)
        sys.meta_path.insert(0, Recorder(fd))
    watch(load)


def tell_of_errors() -> None:
    """An uncaught exception is told to the agent: the process may take long to leave, or wait for peers for ever."""
    shown = sys.excepthook

    def excepthook(kind: "Any", value: "Any", trace: "Any") -> None:
        shown(kind, value, trace)
        if os.getpid() == os.getsid(0) and kind is not KeyboardInterrupt:  # the task itself, not a child it forked
            _tell(kind, value, trace)

    sys.excepthook = sys.__excepthook__ = excepthook


def let_threads_finish() -> None:
    """A thread of torch's that asks for the interpreter once it is going down aborts the process: before Python 3.14
    a few ends in a hundred under gloo. So, as the very last thing at exit, such threads get a turn."""
    import atexit  # built in

    sleep = sys.modules["time"].sleep
    atexit.register(lambda: sleep(_LAST_TURN_S) if "torch" in sys.modules else None)


def _tell(kind: "Any", value: "Any", trace: "Any") -> None:
    import json

    if trace is None:  # a script that does not compile
        place = f"{getattr(value, 'filename', '')}:{getattr(value, 'lineno', '')}"
    else:
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        fd = int(os.environ["PACELINE_REPORT_FD"])
        if str(os.fstat(fd).st_ino) == os.environ["PACELINE_REPORT_INODE"]:
            os.write(fd, json.dumps({"_": "raised", "type": name, "text": str(value)[:4000], "place": place}).encode())
    except (KeyError, ValueError, OSError):
        pass


def watch(load: "Callable[..., Any]") -> "dict[str, str]":
    """Modules that are looked out for, and what of ours is told of each."""
    found = {name: told for variable, (name, told) in _TOLD.items() if os.environ.get(variable)}
    for name, told in found.items():
        sys.meta_path.insert(0, Watch(name, told, load))
    return found


def kind_of(spec: "ModuleSpec") -> str:
    """Whether a module is Python's own, installed, or the person's own code."""
    if spec.origin in ("built-in", "frozen"):
        return STANDARD
    place = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    if place is None:
        return UNKNOWN
    return place_kind(place)


def place_kind(place: str) -> str:
    place += os.sep
    for folder in _SITE_FOLDERS:
        if folder in place:
            return SITE
    return STANDARD if place.startswith(_STANDARD_FOLDER) else OWN


def being_imported(name: str) -> bool:
    """True within an import of `name`, False where somebody only asks for its spec."""
    return name in _bootstrap._module_locks


def find(finder: object, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
    """What the finders behind `finder` find."""
    behind = False
    for other in list(sys.meta_path):
        if behind:
            try:
                find_spec = other.find_spec
            except AttributeError:  # an old kind of finder: Python itself knows what to do with it
                return None
            spec = find_spec(name, path, target)
            if spec is not None:
                return spec
        elif other is finder:
            behind = True
    return None


def threads() -> int:
    try:
        return os.stat("/proc/self/task").st_nlink - 2  # as many as it has folders, without listing them
    except OSError:
        return 1


class Recorder:
    """Writes the installed modules a program imports, in order, and under which environment and path it did.

    What such a module imports in turn follows from it and is not written: thousands, that would cost every start.
    A line is a module's name, or the state from there on: what is different in the environment since the start,
    sys.path, and whether the program had threads of its own by then, after which it cannot be started over.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.file = os.fstat(fd)
        self.pid = os.getpid()
        self.thread = _thread.get_ident()
        self.start: dict[bytes, bytes] = os.environ._data.copy()  # type: ignore[attr-defined]
        self.environment: dict[bytes, bytes] = {}
        self.path: list[str] = []
        self.late = False
        # The module that the program imports; before it, some Pythons have a sitecustomize of their own.
        self.root = "sitecustomize"
        self.locks = _bootstrap._module_locks
        self.native = True
        self.threads = 1
        self.counted = 0.0
        self.left = _MOST_MODULES
        self.text = ""
        self.written = 0.0

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if self.root in self.locks:
            now = _now()
            if now - self.counted > _BETWEEN_COUNTS_S:  # a library's own threads are no threads of the program
                self.threads, self.counted = threads(), now
                if self.text and now - self.written > _UNWRITTEN_S:  # it may take seconds until the program's next
                    self._write(now)
            return None
        spec = find(self, name, path, target)
        if self.left and spec is not None and name in _bootstrap._module_locks:
            try:
                self._record(name, spec)
            except Exception:
                self.left = 0
        return spec

    def _record(self, name: str, spec: "ModuleSpec") -> None:
        if os.getpid() != self.pid or _thread.get_ident() != self.thread:
            return
        kind = kind_of(spec)
        if kind is OWN or kind is UNKNOWN:
            return
        if self.native:
            self.threads = threads()
        elif not self.late and threads() > self.threads:
            self.late = True
            self.path = []
        self.root = name
        self.native = spec.origin is not None and spec.origin.endswith(".so")
        environment = os.environ._data  # type: ignore[attr-defined]
        if self.path != sys.path or self.environment != environment:
            self.environment, self.path = environment.copy(), list(sys.path)
            self.text += self._state() + "\n"
        self.text += _quoted(name) + "\n"
        self.left -= 1
        now = _now()
        if now - self.written > _UNWRITTEN_S:
            self._write(now)

    def _write(self, now: float) -> None:
        text, self.text, self.written = self.text, "", now
        try:
            if os.path.samestat(os.fstat(self.fd), self.file):  # else the program has closed it, and uses the number
                os.write(self.fd, text.encode("ascii"))
                return
        except OSError:
            pass
        self.left = 0

    def _state(self) -> str:
        names = {*self.start, *self.environment}
        changed = [
            _quoted(os.fsdecode(name)) + ":" + ("null" if value is None else _quoted(os.fsdecode(value)))
            for name, value in ((name, self.environment.get(name)) for name in names)
            if value != self.start.get(name)
        ]
        path = ",".join(_quoted(entry) for entry in self.path if isinstance(entry, str))
        return f'{{"environment":{{{",".join(changed)}}},"path":[{path}],"late":{"true" if self.late else "false"}}}'


def _quoted(text: str) -> str:
    """A JSON string, without importing json."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    units = text.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)) + '"'


class Watch:
    """Tells a module of ours of one that the program imports: JAX's cluster detection, or Keras."""

    def __init__(self, name: str, told: str, load: "Callable[..., Any]") -> None:
        self.name = name
        self.told = told
        self.load = load

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if name != self.name:
            return None
        spec = find(self, name, path, target)
        if spec is not None and spec.loader is not None and being_imported(name):
            sys.meta_path.remove(self)
            spec.loader = _Registering(spec.loader, self.told, self.load)  # type: ignore[assignment]
        return spec


class _Registering:
    def __init__(self, loader: "Any", told: str, load: "Callable[..., Any]") -> None:
        self.loader = loader
        self.told = told
        self.load = load

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        return self.loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.load("frameworks", self.told).register(module)
