"""Runs in a task's interpreter before its program: records its imports, or turns the interpreter into a spare.

frameworks/site/sitecustomize.py loads it while Python starts; Python itself then runs the program as usual. It is part
of every start, so it imports only modules that are already loaded.
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
# If the variable is set, the function `register` of our file is called once the program has imported the module.
_STAGES = "start_stages.py"
_HOOKS = {
    "PACELINE_JAX_COORDINATOR": {"jax._src.clusters": "jax_cluster.py"},
    "PACELINE_PATCH_KERAS": {"keras": "keras_fit.py"},
    "PACELINE_COMPILE_CACHE": {"jax._src.compiler": "jax_compile_cache.py"},
    "PACELINE_COMPARE_INITIAL_VALUES": {
        "tensorflow.python.distribute.collective_all_reduce_strategy": "tensorflow_initial_values.py"
    },
    "PACELINE_LEADER": {
        "tensorflow.python.distribute.collective_all_reduce_strategy": "leader_wait.py",
        "jax._src.distributed": "leader_wait.py",
    },
    "PACELINE_REPORT_INODE": dict.fromkeys(
        (
            "tensorflow", "tensorflow.python.distribute.collective_all_reduce_strategy",
            "tensorflow.python.distribute.parameter_server_strategy_v2",
            "torch", "torch.distributed.distributed_c10d", "jax", "jax._src.distributed",
        ),
        _STAGES,
    ),
}  # fmt: skip
_MOST_MODULES = 20_000
_UNWRITTEN_S = 0.02  # seconds of imports that may stay unrecorded if a task is killed
_BETWEEN_COUNTS_S = 0.001
_EXIT_DELAY_S = 0.05
_NO_COLLECTION = 10**9  # new objects, before a collection
_MOST_FRAME_CHARACTERS = 20_000  # of the names of files in a reported traceback, which is one datagram


def begin(mode: str, fd: int, import_recorder: "Any", load: "Callable[..., Any]") -> None:
    """Returns when the program can start; in a spare, that is once in every task forked from it."""
    report_exceptions()
    prepare_exit()
    stack_signal = load("frameworks", "stack_signal.py")
    stack_signal.note_threads()
    if mode == "spare":
        load("agent", "spares", "spare_process.py").serve(fd, import_recorder, load)
        stack_signal.register()
        return
    stack_signal.register()
    if fd >= 0 and hasattr(_bootstrap, "_module_locks"):
        os.set_inheritable(fd, False)
        sys.meta_path.insert(0, Recorder(fd))
    install_hooks(load, in_task=bool(mode))


def report_exceptions() -> None:
    """Reports an uncaught exception to the agent: the process may take long to exit, or wait for its peers forever."""
    original = sys.excepthook

    def excepthook(kind: "Any", value: "Any", trace: "Any") -> None:
        original(kind, value, trace)
        if os.getpid() == os.getsid(0) and kind is not KeyboardInterrupt:  # the task itself, not a forked child
            _report_exception(kind, value, trace)

    sys.excepthook = sys.__excepthook__ = excepthook


def prepare_exit() -> None:
    """At the very end of the exit, objects that were frozen (`pause_collection`) can be collected again: extension
    modules complain about those that remain. If torch is loaded, the exit waits a moment: before Python 3.14, a thread
    of torch that takes the GIL during shutdown aborts the process; with gloo, that happened in a few exits in a
    hundred."""
    import atexit  # built in
    import gc  # built in

    sleep = sys.modules["time"].sleep
    atexit.register(gc.unfreeze)
    atexit.register(lambda: sleep(_EXIT_DELAY_S) if "torch" in sys.modules else None)


def _report_exception(kind: "Any", value: "Any", trace: "Any") -> None:
    import json

    frames = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, str(trace.tb_lineno)))
        trace = trace.tb_next
    if isinstance(value, SyntaxError) or not frames:
        frames.append((str(getattr(value, "filename", "")), str(getattr(value, "lineno", ""))))
    while sum(len(file) for file, _ in frames) > _MOST_FRAME_CHARACTERS and len(frames) > 1:
        del frames[: (len(frames) + 1) // 2]  # the outermost
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        fd = int(os.environ["PACELINE_REPORT_FD"])
        if str(os.fstat(fd).st_ino) == os.environ["PACELINE_REPORT_INODE"]:
            message = {"_": "raised", "type": name, "text": str(value)[:4000], "frames": frames}
            os.write(fd, json.dumps(message).encode())
    except (KeyError, ValueError, OSError):
        pass


def install_hooks(load: "Callable[..., Any]", in_task: bool = True) -> "ImportHook":
    """Installs the hooks whose variables are set. `in_task`: this interpreter was started as that of a task."""
    files: dict[str, list[str]] = {}
    for variable, more in _HOOKS.items():
        if os.environ.get(variable) and (in_task or _STAGES not in more.values()):
            for module, file in more.items():
                files.setdefault(module, []).append(file)
    hook = ImportHook(files, load)
    if files:
        sys.meta_path.insert(0, hook)
    return hook


def kind_of(spec: "ModuleSpec") -> str:
    """Whether a module belongs to the standard library, to an installed package, or to the user's code."""
    if spec.origin in ("built-in", "frozen"):
        return STANDARD
    path = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    if path is None:
        return UNKNOWN
    return path_kind(path)


def path_kind(path: str) -> str:
    path += os.sep
    for folder in _SITE_FOLDERS:
        if folder in path:
            return SITE
    return STANDARD if path.startswith(_STANDARD_FOLDER) else OWN


def is_being_imported(name: str) -> bool:
    """True during an import of `name`, False if only its spec is requested."""
    return name in _bootstrap._module_locks


def find(finder: object, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
    """The spec from the finders that follow `finder`."""
    is_after = False
    for other in list(sys.meta_path):
        if is_after:
            try:
                find_spec = other.find_spec
            except AttributeError:  # a legacy finder: Python itself handles it
                return None
            spec = find_spec(name, path, target)
            if spec is not None:
                return spec
        elif other is finder:
            is_after = True
    return None


def threads() -> int:
    try:
        return os.stat("/proc/self/task").st_nlink - 2  # the number of its subfolders, without listing them
    except OSError:
        return 1


class Recorder:
    """Records the installed modules that a program imports, in order, with the environment and path at that time.

    Modules that these import in turn are not recorded: there are thousands, which would slow down every start.
    A line is the name of a module, or the state from there on: how the environment differs from the start, sys.path,
    and whether the program had started threads by then, after which it cannot be restarted.
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
        # The module that the program is importing; before the first one, some Pythons import their own sitecustomize.
        self.root = "sitecustomize"
        self.locks = _bootstrap._module_locks
        self.native = True
        self.threads = 1
        self.counted = 0.0
        self.remaining = _MOST_MODULES
        self.text = ""
        self.written_at = 0.0

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if self.root in self.locks:
            now = _now()
            if now - self.counted > _BETWEEN_COUNTS_S:  # threads of a library are not the program's
                self.threads, self.counted = threads(), now
                if self.text and now - self.written_at > _UNWRITTEN_S:  # the program's next import may take seconds
                    self._write(now)
            return None
        spec = find(self, name, path, target)
        if self.remaining and spec is not None and name in _bootstrap._module_locks:
            try:
                self._record(name, spec)
            except Exception:
                self.remaining = 0
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
        self.remaining -= 1
        now = _now()
        if now - self.written_at > _UNWRITTEN_S:
            self._write(now)

    def _write(self, now: float) -> None:
        text, self.text, self.written_at = self.text, "", now
        try:
            if os.path.samestat(os.fstat(self.fd), self.file):  # otherwise the program has closed and reused it
                os.write(self.fd, text.encode("ascii"))
                return
        except OSError:
            pass
        self.remaining = 0

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


class ImportHook:
    """Calls `register` of our files after the program has imported certain modules: JAX's cluster detection, Keras,
    TensorFlow's strategy for workers, and those that show how far the start has come. Measures how long the program's
    imports take."""

    def __init__(self, files: "dict[str, list[str]]", load: "Callable[..., Any]") -> None:
        """`files`: module -> our files that handle its import."""
        self.files = files
        self.load = load
        self.loaded: dict[str, Any] = {}
        self.thread = _thread.get_ident()
        self.locks: Any = getattr(_bootstrap, "_module_locks", {})
        self.root = ""  # the module that the program is importing, which in turn imports others
        self.last = 0.0  # when an import was last observed
        self.seconds = 0.0  # within imports of the program

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if _thread.get_ident() == self.thread:
            now = _now()
            if self.root in self.locks:
                self.seconds += now - self.last
            else:
                self.root = name
            self.last = now
        if name not in self.files:
            return None
        spec = find(self, name, path, target)
        if spec is not None and spec.loader is not None and is_being_imported(name):
            spec.loader = _RegisteringLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def seconds_of_imports(self) -> float:
        """Until now. The end of a module's own code, after its last import, is not part of it."""
        return self.seconds + (_now() - self.last if self.root in self.locks else 0.0)

    def register(self, name: str, module: "Any") -> None:
        for file in self.files.pop(name, ()):
            if file not in self.loaded:
                self.loaded[file] = self.load("frameworks", file)
                if file == _STAGES:
                    self.loaded[file].seconds_of_imports = self.seconds_of_imports
            self.loaded[file].register(module)


class _RegisteringLoader:
    def __init__(self, loader: "Any", hook: ImportHook) -> None:
        self.loader = loader
        self.hook = hook

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        return self.loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        resume = pause_collection()
        try:
            self.loader.exec_module(module)
        finally:
            resume()
        self.hook.register(module.__name__, module)


def pause_collection(freeze: bool = False) -> "Callable[[], None]":
    """Pauses Python's garbage collection; the result ends the pause. During the import of a framework, which creates
    hundreds of thousands of objects that stay, collecting takes a fifth of the time and frees almost nothing. These
    objects are then among the oldest ones, as if they had been examined. A program's own settings are kept.

    `freeze`: later collections do not examine them again. Only in a spare, before the program has objects of its own.
    """
    import gc  # built in

    before = gc.get_threshold()
    if not gc.isenabled() or not 0 < before[0] < _NO_COLLECTION:
        return lambda: None
    gc.set_threshold(_NO_COLLECTION, *before[1:])

    def resume() -> None:
        if gc.get_threshold() == (_NO_COLLECTION, *before[1:]):
            gc.set_threshold(*before)
            if freeze or not gc.get_freeze_count():
                gc.freeze()  # moves all objects, without examining them
                if not freeze:
                    gc.unfreeze()  # to the oldest generation

    return resume
