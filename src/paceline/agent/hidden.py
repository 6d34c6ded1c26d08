"""What a spare has imported: hidden from the program of a task, and given back when the program imports it.

Only under the environment and path of the record, though: otherwise the task executes itself anew, without a spare.
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


class Group:
    """What one import of the program brings, and the state it is valid under."""

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


class Preloaded:
    """The modules of a spare, and the finder that watches over their import."""

    def __init__(self, order: "dict[str, Any]", starter: "Any", traces: "Any") -> None:
        self.order = order
        self.starter = starter
        self.traces = traces
        self.attempted: set[str] = set()
        self.standard: set[str] = {name.partition(".")[0] for name in sys.modules}
        self.own = ""
        self.reads: dict[str, str] = {}
        self.static: dict[str, str] = {}
        self.given: dict[str, str] = {}  # what Python set by itself, as it does with LC_CTYPE
        self.hidden: dict[str, Group] = {}
        self.kept: set[int] = set()  # file descriptors that belong to the modules
        self.process = traces.Process()
        self.before = traces.visible()
        self.told: dict[str, Any] = {}  # modules of ours, by the name of the one that each is told of

    def load(self) -> str:
        """Imports the modules of the record; why this spare cannot be used, or an empty string."""
        self.static = dict(os.environ)
        sent = self.order["environment"]
        self.given = {name: value for name, value in self.static.items() if sent.get(name) != value}
        data = os.environ._data  # type: ignore[attr-defined]
        os.environ._data = self.traces.Watched(data)  # type: ignore[attr-defined]
        path, main = list(sys.path), sys.modules["__main__"]
        if self.order["kind"] == "script":
            main.__file__ = self.order["target"]
        sys.meta_path.insert(0, self)
        for state in self.order["record"]:
            for name in state["modules"]:
                if name not in sys.modules and name not in self.attempted and not self.own:
                    self._import(Group(name, state))
        sys.meta_path.remove(self)
        main.__dict__.pop("__file__", None)
        sys.path[:] = path
        os.environ._data = dict(os.environ._data)  # type: ignore[attr-defined]
        self.traces.set_environment(self.static)
        self.traces.show(self.before)
        for name in self.hidden:
            del sys.modules[name]
        for entry in list(sys.path_importer_cache):
            if self.starter.place_kind(entry) == self.starter.OWN:
                del sys.path_importer_cache[entry]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if self.own:
            return f"installed packages import {self.own}, which is not installed"
        why, self.kept = self.process.changes(self.starter.threads)
        return str(why)

    def _import(self, group: Group) -> None:
        loaded = set(sys.modules)
        environment = {**self.static, **{name: value for name, value in group.environment.items() if value is not None}}
        for name, value in group.environment.items():
            if value is None:
                environment.pop(name, None)
        self.traces.set_environment(environment)
        sys.path[:] = group.path
        group.before = self.traces.visible()
        watched = os.environ._data  # type: ignore[attr-defined]
        watched.reads.clear()
        try:
            __import__(group.root)
        except BaseException:
            pass  # the program will see it for itself
        for name in watched.reads:
            self.reads.setdefault(os.fsdecode(name), group.root)
        changed = dict(os.environ)
        group.sets = {
            name: changed.get(name) for name in {*changed, *environment} if changed.get(name) != environment.get(name)
        }
        group.path_after = list(sys.path)
        group.after = self.traces.visible()
        for name, module in list(sys.modules.items()):
            if name not in loaded and name.partition(".")[0] not in self.standard:
                group.modules[name] = module
                self.hidden[name] = group

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        spec: ModuleSpec | None = self.starter.find(self, name, path, target)
        if spec is not None and self.starter.being_imported(name):
            kind = self.starter.kind_of(spec)
            if kind == self.starter.OWN:
                self.own = name
                raise ImportError(name)
            if kind == self.starter.STANDARD:
                self.standard.add(name.partition(".")[0])
            self.attempted.add(name)
        return spec

    def module(self, name: str) -> "Any":
        group = self.hidden.get(name)
        return group.modules[name] if group else sys.modules.get(name)

    def enter_task(self, environment: "dict[str, str]", again: "dict[str, Any]") -> None:
        giver = Giver(self, environment, again)
        read = sorted(giver.late & set(self.reads))
        if read:
            giver.start_over(f"{self.reads[read[0]]} reads {read[0]} when it is imported", final=False)
        if self.hidden:
            sys.meta_path.insert(0, giver)


class Giver:
    """The finder of a task that gives hidden modules back, or starts the task over where they would not be right."""

    def __init__(self, preloaded: Preloaded, environment: "dict[str, str]", again: "dict[str, Any]") -> None:
        self.preloaded = preloaded
        self.hidden = preloaded.hidden
        self.environment = environment
        self.again = again
        self.pid = os.getpid()
        self.thread = _thread.get_ident()
        self.report = os.fstat(_REPORT).st_ino if _is_open(_REPORT) else -1
        static = preloaded.static
        # Set for this start: the imports have not read them, so a program may change them as it likes.
        self.late = {name for name in {*static, *environment} if static.get(name) != environment.get(name)}
        self.told = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        group = self.hidden.get(name)
        if group is None:
            return None
        if not self.preloaded.starter.being_imported(name):
            spec: ModuleSpec | None = getattr(group.modules[name], "__spec__", None)
            return spec
        why = self._difference(group)
        if why:
            self.start_over(why, final=group.late)
        return type(sys.__spec__)(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: "ModuleSpec") -> None:
        """Python makes an empty module, which exec_module replaces: the real one is not touched."""

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
        self.preloaded.traces.change(group.before, group.after)
        for watched, ours in self.preloaded.told.items():
            if watched in group.modules:
                ours.register(group.modules[watched])
        if not self.hidden:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def _difference(self, group: Group) -> str:
        now, start = dict(os.environ), self.environment
        found = {name: now.get(name) for name in {*now, *start} if now.get(name) != start.get(name)}
        names = {
            name
            for name in {*found, *group.environment} - self.late
            if found.get(name, _MISSING) != group.environment.get(name, _MISSING)
        }
        if names:
            return f"{group.root} is imported under other values of {', '.join(sorted(names)[:5])} than last time"
        if sys.path != group.path:
            return f"{group.root} is imported under another sys.path than last time"
        return ""

    def start_over(self, why: str, final: bool) -> None:
        """Executes the program from its beginning without a spare, unless it is too far for that."""
        if os.getpid() != self.pid or self.told:
            return
        self.told = True
        if self.report >= 0 and _is_open(_REPORT) and os.fstat(_REPORT).st_ino == self.report:
            try:
                report = _socket.socket(fileno=os.dup(_REPORT))
                report.send(json.dumps({"_": "cold", "why": why}).encode(), _socket.MSG_DONTWAIT)
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
