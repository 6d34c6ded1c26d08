"""The modules that a spare has imported: hidden from the program of a task until the program imports them.

If the environment or sys.path differs from the record at that moment, the task restarts itself without a spare.
"""

import _socket
import _thread
import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

_REPORT = 3
_MISSING = object()
_YES, _NO = 11, 10  # exit codes


class Group:
    """The modules that one import of the program loads, and the state in which they are valid."""

    def __init__(self, root: str, state: "dict[str, Any]") -> None:
        self.root = root
        self.environment: dict[str, str | None] = state["environment"]
        self.path: list[str] = state["path"]
        self.late: bool = state["late"]
        self.modules: dict[str, Any] = {}
        self.sets: dict[str, str | None] = {}
        self.path_after: list[str] = []
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}


class CudaAnswers:
    """Answers `torch.cuda.is_available()` while modules are imported. The function initializes CUDA, after which a
    process cannot be forked, so a fork calls it. torch.compile imports modules that call it."""

    def __init__(self, devices: str) -> None:
        """`devices`: the GPUs of the tasks, as in CUDA_VISIBLE_DEVICES."""
        self.devices = devices
        self.module: Any = None
        self.original: Any = None
        self.is_loading = True

    def install(self) -> None:
        """Once torch.cuda has been imported."""
        module: Any = sys.modules.get("torch.cuda")
        if self.module is None and hasattr(module, "is_available"):
            self.module, self.original = module, module.is_available
            module.is_available = self.is_available

    def remove(self) -> None:
        self.is_loading = False  # a module may have its own reference to the function
        if self.module is not None and self.module.is_available == self.is_available:
            self.module.is_available = self.original

    def is_available(self) -> bool:
        if self.is_loading:
            pid = os.fork()
            if pid == 0:
                try:
                    os.environ["CUDA_VISIBLE_DEVICES"] = self.devices
                    os._exit(_YES if self.original() else _NO)
                finally:
                    os._exit(1)
            code = os.waitpid(pid, 0)[1] >> 8
            if code in (_YES, _NO):
                return code == _YES
        return bool(self.original())


class Preloaded:
    """The modules of a spare, and the finder that observes their import."""

    def __init__(self, order: "dict[str, Any]", import_recorder: "Any", effects: "Any") -> None:
        self.order = order
        self.import_recorder = import_recorder
        self.effects = effects
        self.attempted: set[str] = set()
        self.standard: set[str] = {name.partition(".")[0] for name in sys.modules}
        self.cuda = CudaAnswers(order["devices"])
        self.openers: dict[int, str] = {}  # file descriptor that forks cannot share -> the import that opened it
        self.own_module = ""  # a module of the user's code that an installed package imports
        self.reads: dict[str, str] = {}  # environment variable -> the module that read it
        self.static: dict[str, str] = {}
        self.python_set: dict[str, str] = {}  # variables that Python itself sets, such as LC_CTYPE
        self.hidden: dict[str, Group] = {}
        self.module_fds: set[int] = set()  # file descriptors that the modules opened
        self.process = effects.Process()
        self.before = effects.capture_state()
        self.hook: Any = None  # the ImportHook of the task

    def load(self) -> str:
        """Imports the modules of the record. Returns why this spare cannot be used, or an empty string."""
        self.static = dict(os.environ)
        sent = self.order["environment"]
        self.python_set = {name: value for name, value in self.static.items() if sent.get(name) != value}
        data = os.environ._data  # type: ignore[attr-defined]
        os.environ._data = self.effects.RecordingEnvironment(data)  # type: ignore[attr-defined]
        path, main = list(sys.path), sys.modules["__main__"]
        if self.order["kind"] == "script":
            main.__file__ = self.order["target"]
        sys.meta_path.insert(0, self)
        for state in self.order["record"]:
            for name in state["modules"]:
                if name not in sys.modules and name not in self.attempted and not self.own_module:
                    self._import(Group(name, state))
                    self.openers = {fd: self.openers.get(fd, name) for fd in self.process.unshareable_fds()}
        sys.meta_path.remove(self)
        self.cuda.remove()
        main.__dict__.pop("__file__", None)
        sys.path[:] = path
        os.environ._data = dict(os.environ._data)  # type: ignore[attr-defined]
        self.effects.set_environment(self.static)
        self.effects.restore_state(self.before)
        for name in self.hidden:
            del sys.modules[name]
        for entry in list(sys.path_importer_cache):
            if self.import_recorder.path_kind(entry) == self.import_recorder.OWN:
                del sys.path_importer_cache[entry]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if self.own_module:
            return f"installed packages import {self.own_module}, which is not installed"
        reason, self.module_fds = self.process.changes(self.import_recorder.threads)
        return str(reason)

    def _import(self, group: Group) -> None:
        loaded = set(sys.modules)
        environment = {**self.static, **{name: value for name, value in group.environment.items() if value is not None}}
        for name, value in group.environment.items():
            if value is None:
                environment.pop(name, None)
        self.effects.set_environment(environment)
        sys.path[:] = group.path
        group.before = self.effects.capture_state()
        variables = os.environ._data  # type: ignore[attr-defined]
        variables.reads.clear()
        resume_collection = self.import_recorder.pause_collection(freeze=True)
        try:
            __import__(group.root)
        except BaseException:
            pass  # the program will get the same error
        resume_collection()
        for name in variables.reads:
            self.reads.setdefault(os.fsdecode(name), group.root)
        changed = dict(os.environ)
        group.sets = {
            name: changed.get(name) for name in {*changed, *environment} if changed.get(name) != environment.get(name)
        }
        group.path_after = list(sys.path)
        group.after = self.effects.capture_state()
        for name, module in list(sys.modules.items()):
            if name not in loaded and name.partition(".")[0] not in self.standard:
                group.modules[name] = module
                self.hidden[name] = group

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        self.cuda.install()
        spec: ModuleSpec | None = self.import_recorder.find(self, name, path, target)
        if spec is not None and self.import_recorder.is_being_imported(name):
            kind = self.import_recorder.kind_of(spec)
            if kind == self.import_recorder.OWN:
                self.own_module = name
                raise ImportError(name)
            if kind == self.import_recorder.STANDARD:
                self.standard.add(name.partition(".")[0])
            self.attempted.add(name)
        return spec

    def module(self, name: str) -> "Any":
        group = self.hidden.get(name)
        return group.modules[name] if group else sys.modules.get(name)

    def enter_task(self, environment: "dict[str, str]", again: "dict[str, Any]") -> None:
        finder = HiddenModuleFinder(self, environment, again)
        late_reads = sorted(finder.late & set(self.reads))
        if late_reads:
            finder.restart_cold(f"{self.reads[late_reads[0]]} reads {late_reads[0]} when it is imported", final=False)
        if self.hidden:
            sys.meta_path.insert(0, finder)


class HiddenModuleFinder:
    """The finder of a task that reveals hidden modules, or restarts the task if they would not be valid."""

    def __init__(self, preloaded: Preloaded, environment: "dict[str, str]", again: "dict[str, Any]") -> None:
        self.preloaded = preloaded
        self.hidden = preloaded.hidden
        self.environment = environment
        self.again = again
        self.pid = os.getpid()
        self.thread = _thread.get_ident()
        self.report = os.fstat(_REPORT).st_ino if _is_open(_REPORT) else -1
        static = preloaded.static
        # Set for this task: the imports have not read them, so the program may change them.
        self.late = {name for name in {*static, *environment} if static.get(name) != environment.get(name)}
        self.reported = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        group = self.hidden.get(name)
        if group is None:
            return None
        if not self.preloaded.import_recorder.is_being_imported(name):
            spec: ModuleSpec | None = getattr(group.modules[name], "__spec__", None)
            return spec
        reason = self._difference(group)
        if reason:
            self.restart_cold(reason, final=group.late)
        return type(sys.__spec__)(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: "ModuleSpec") -> None:
        """Lets Python create an empty module, which exec_module replaces: the real one stays unchanged."""

    def exec_module(self, module: "Any") -> None:
        name = module.__name__
        group = self.hidden[name]
        sys.modules[name] = group.modules[name]
        for other, real in group.modules.items():
            self.hidden.pop(other, None)
            sys.modules.setdefault(other, real)
        for variable, value in group.sets.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        if group.path_after != group.path:
            sys.path[:] = group.path_after
        self.preloaded.effects.replay_changes(group.before, group.after)
        for module_name in list(self.preloaded.hook.files):
            if module_name in group.modules:
                self.preloaded.hook.register(module_name, group.modules[module_name])
        if not self.hidden:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def _difference(self, group: Group) -> str:
        now, start = dict(os.environ), self.environment
        changes = {name: now.get(name) for name in {*now, *start} if now.get(name) != start.get(name)}
        names = {
            name
            for name in {*changes, *group.environment} - self.late
            if changes.get(name, _MISSING) != group.environment.get(name, _MISSING)
        }
        if names:
            return f"{group.root} is imported with different values of {', '.join(sorted(names)[:5])} than last time"
        if sys.path != group.path:
            return f"{group.root} is imported with a different sys.path than last time"
        return ""

    def restart_cold(self, reason: str, final: bool) -> None:
        """Runs the program again from the start without a spare, unless it is too late for that (`final`)."""
        if os.getpid() != self.pid or self.reported:
            return
        self.reported = True
        if self.report >= 0 and _is_open(_REPORT) and os.fstat(_REPORT).st_ino == self.report:
            try:
                report = _socket.socket(fileno=os.dup(_REPORT))
                report.send(json.dumps({"_": "cold", "why": reason}).encode(), _socket.MSG_DONTWAIT)
                report.close()
            except OSError:
                pass
        if final or _thread.get_ident() != self.thread:
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        for number in set(range(1, signal.NSIG)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                pass
        try:
            os.chdir(self.preloaded.process.cwd)
            os.umask(self.preloaded.process.umask)
            order = self.preloaded.order
            os.execve(order["argv"][0], order["argv"], {**self.environment, **self.again})
        except OSError:
            pass


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
