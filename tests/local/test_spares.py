"""A program cannot tell how it was started: by Python alone, recorded, or from a spare. Real frameworks, real forks."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.agent import machine
from paceline.agent.spares import spare as starting
from paceline.agent.spares.spare import ContextOrder, Message, Ready, Record, Spare, Started, Unfit
from paceline.agent.tasks.python_command import Python, parse_command
from support.runs import end_started_since

DEADLINE = 120.0
STATIC = {
    "PATH": os.environ["PATH"],
    "HOME": os.environ.get("HOME", "/"),
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}
LATE = {"PACELINE_GENERATION": "2", "RANK": "1", "TF_CONFIG": "{}", "PACELINE_REPORT_FD": "3"}


@pytest.fixture(scope="module", autouse=True)
def parent_of_orphans() -> Iterator[None]:
    """This process plays the agent."""
    machine.become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    children = set(psutil.Process().children())
    yield
    # Processes that tasks leave behind for a moment (a resource tracker) are now our children.
    assert end_started_since(children, wait=10) == []
    assert {path.name for path in Path("/proc/self/fd").iterdir()} <= before


@dataclass
class Ended:
    code: int
    out: str
    err: str
    reports: list[dict[str, object]]
    pid: int


@dataclass
class Streams:
    """The agent's ends of a task's pipes and report socket."""

    out: int = -1
    err: int = -1
    task_fds: list[int] = field(default_factory=list)
    report: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.report, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.task_fds = [out, err, report.detach()]

    def release(self) -> None:
        while self.task_fds:
            os.close(self.task_fds.pop())

    def end(self, pid: int) -> Ended:
        text = {self.out: b"", self.err: b""}
        open_fds, deadline = {self.out, self.err}, time.monotonic() + DEADLINE
        while open_fds:
            readable, _, _ = select.select(open_fds, [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"still running after {DEADLINE} s: {text}"
            for fd in readable:
                data = os.read(fd, 65536)
                text[fd] += data
                if not data:
                    open_fds.remove(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        reports = []
        while select.select([self.report], [], [], 0)[0]:
            data = self.report.recv(65536)
            if not data:
                break
            reports.append(json.loads(data))
        self.close()
        return Ended(code, text[self.out].decode(), text[self.err].decode(), reports, pid)

    def close(self) -> None:
        self.release()
        os.close(self.out)
        os.close(self.err)
        self.report.close()


def python_of(command: list[str], folder: Path, interpreter: str = sys.executable) -> Python:
    python = parse_command(command, interpreter, cwd=str(folder))
    assert python is not None
    return python


def begin(command: list[str], folder: Path, env: Mapping[str, str], record: Path | None = None) -> tuple[int, Streams]:
    streams = Streams()
    fd = os.open(record, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) if record else -1
    try:
        out, err, report = streams.task_fds
        pid = starting.start_cold(python_of(command, folder), env, str(folder), out, err, report, fd)
    except BaseException:
        streams.close()
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    streams.release()
    return pid, streams


def run_cold(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None, record: Path | None = None
) -> Ended:
    pid, streams = begin(command, folder, env or {**STATIC, **LATE}, record)
    return streams.end(pid)


def recorded(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> Record:
    run_cold(command, folder, env, folder / "record.jsonl")
    return starting.read_record(folder / "record.jsonl")


def answer(spare: Spare) -> Message:
    deadline = time.monotonic() + DEADLINE
    while True:
        readable, _, _ = select.select([spare], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, "the spare does not answer"
        for message in spare.receive():
            return message


class Warm:
    """A spare that is ready, closed at the end."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        record: Record,
        env: Mapping[str, str] = STATIC,
        devices: Sequence[str] = (),
    ) -> None:
        self.spare = Spare.spawn(python_of(command, folder), env, str(folder), record, devices=devices)
        self.state = answer(self.spare)

    def __enter__(self) -> Warm:
        return self

    def begin(
        self, env: Mapping[str, str] | None = None, argv: Sequence[str] | None = None, standby: str = ""
    ) -> tuple[int, Streams]:
        assert isinstance(self.state, Ready), self.state
        streams = Streams()
        out, err, report = streams.task_fds
        self.spare.start(env or {**STATIC, **LATE}, out, err, report, argv, standby)
        streams.release()
        message = answer(self.spare)
        assert isinstance(message, Started), message
        return message.pid, streams

    def run(self, env: Mapping[str, str] | None = None) -> Ended:
        pid, streams = self.begin(env)
        return streams.end(pid)

    def __exit__(self, *_: object) -> None:
        self.spare.close()
        os.waitpid(self.spare.pid, 0)


def run_plain(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> Ended:
    streams = Streams()
    python = python_of(command, folder)
    pid = starting.start_plain(python.argv, env or {**STATIC, **LATE}, str(folder), *streams.task_fds)
    streams.release()
    return streams.end(pid)


def three_ways(command: list[str], folder: Path) -> list[Ended]:
    plain = run_plain(command, folder)
    cold = run_cold(command, folder, record=folder / "record.jsonl")
    with Warm(command, folder, starting.read_record(folder / "record.jsonl")) as warm:
        return [plain, cold, warm.run()]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("form", [["train.py"], ["-m", "train"], ["-c", "import train"]], ids=" ".join)
def test_a_task_may_have_other_arguments_than_its_spare(tmp_path: Path, form: list[str]) -> None:
    write(tmp_path / "train.py", "import json, sys\nprint(sys.argv[1:], sys.orig_argv[-2:])\n")
    command = ["python", *form, "--rank=$PACELINE_RANK", "x"]
    with Warm(command, tmp_path, recorded(command, tmp_path)) as warm:
        pid, streams = warm.begin(argv=[sys.executable, *form, "--rank=1", "x"])
        ended = streams.end(pid)
    assert (ended.code, ended.out) == (0, "['--rank=1', 'x'] ['--rank=1', 'x']\n"), ended


PROBE = '''
    """Says everything about this interpreter."""
    import sys
    FIRST = {"numpy" in sys.modules, "paceline" in sys.modules, "sitecustomize" in sys.modules}
    FILTERS = None
    import json, os, gc, locale, signal, threading, warnings, logging, random
    FILTERS = [str(item) for item in warnings.filters]
    LOGGERS = sorted(logging.root.manager.loggerDict)
    import importlib.util
    SPEC = importlib.util.find_spec("numpy")
    LOOKED = "numpy" in sys.modules
    import numpy
    import numpy.random

    def attributes(module):
        return {name: repr(getattr(module, name, None)).split(" at 0x")[0]
                for name in sorted(vars(module)) if name.startswith("__") and name != "__warningregistry__"}

    def frames():
        frame, stack = sys._getframe(), []
        while frame:
            stack.append([frame.f_code.co_filename, frame.f_code.co_name])
            frame = frame.f_back
        return stack

    def stream(file):
        return [file.name, file.mode, file.encoding, file.errors, file.line_buffering, file.write_through,
                file.seekable(), file.isatty(), type(file.buffer).__name__]

    print(json.dumps({
        "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None), "path": sys.path, "flags": str(sys.flags),
        "executable": sys.executable, "prefix": sys.prefix, "cwd": os.getcwd(),
        "environ": dict(sorted(os.environ.items())),
        "main": attributes(sys.modules["__main__"]), "frames": frames(), "first": sorted(FIRST), "looked": LOOKED,
        "spec": [SPEC.name, SPEC.origin, type(SPEC.loader).__name__],
        "numpy": [numpy.__spec__.origin, type(numpy.__loader__).__name__, type(numpy.__spec__.loader).__name__],
        "filters": FILTERS, "filters_after": [str(item) for item in warnings.filters],
        "meta_path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "loggers": LOGGERS, "loggers_after": sorted(logging.root.manager.loggerDict),
        "threads": [[thread.name, thread is threading.main_thread(), thread.native_id == os.getpid()]
                    for thread in threading.enumerate()],
        "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
        "mask": [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "stdout": stream(sys.stdout), "stderr": stream(sys.stderr), "stdin": [sys.stdin.name, sys.stdin.encoding],
        "umask": os.umask(0o22), "nice": os.nice(0), "group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0) == os.getpid(),
        "fds": [os.readlink("/proc/self/fd/" + fd).split(":")[0] for fd in "0123"],
        "shows_stacks": callable(signal.getsignal(55)) and any(
            f"paceline-stacks-{os.getpid()} " in os.path.realpath(f"/proc/self/fd/{fd}") for fd in range(60, 80)),
        "more_fds": len(os.listdir("/proc/self/fd")), "next_fd": os.open("/dev/null", 0),
        "locale": locale.setlocale(locale.LC_ALL), "preferred": locale.getpreferredencoding(),
        "gc": [gc.get_threshold(), gc.isenabled()],
        "recursion": sys.getrecursionlimit(), "warnoptions": sys.warnoptions, "xoptions": sys._xoptions,
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "paceline": [name for name in sys.modules if "paceline" in name or "sitecustomize" in name],
        "parent": os.getppid(), "dont_write": sys.dont_write_bytecode, "builtins": sorted(vars(__import__("builtins"))),
    }))
    print(json.dumps([random.random(), float(numpy.random.rand())]))
'''  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ["python", "probe.py", "--epochs", "3"],
        ["python", "-uOP", "-W", "ignore::UserWarning", "-X", "utf8", "sub/../probe.py"],
        ["python", "-m", "pkg.probe", "x"],
        ["python", "-um", "pkg", "x"],
        ["python", "-c", "exec(open('probe.py').read())", "x"],
        ["python", "folder", "x"],
        ["./script", "x"],
    ],
    ids=["script", "flags", "module", "package", "code", "folder", "console-script"],
)
def test_a_program_sees_the_same_interpreter_three_ways(tmp_path: Path, command: list[str]) -> None:
    for name in ("probe.py", "pkg/probe.py", "pkg/__main__.py", "folder/__main__.py"):
        write(tmp_path / name, PROBE)
    write(tmp_path / "pkg/__init__.py", "")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "script", f"#!{sys.executable}\n" + textwrap.dedent(PROBE)).chmod(0o755)
    plain, cold, warm = three_ways(command, tmp_path)
    assert [plain.code, plain.err] == [cold.code, cold.err] == [warm.code, warm.err]
    probes = [json.loads(ended.out.splitlines()[0]) for ended in (plain, cold, warm)]
    assert [probe.pop("shows_stacks") for probe in probes] == [False, True, True]
    for probe in probes[1:]:
        probe["more_fds"] -= 2  # for the stacks
    probes[1]["more_fds"] -= 1  # the record
    probes[1]["meta_path"].remove("Recorder")
    assert probes[1] == probes[0]
    assert probes[2] == probes[0]
    assert (probes[0]["parent"], probes[0]["looked"]) == (os.getpid(), False)
    assert warm.reports == []


def test_the_sitecustomize_of_python_is_not_recorded_as_the_program_s(tmp_path: Path) -> None:
    """Debian's Python has one."""
    site = tmp_path / "site-packages"
    write(site / "sitecustomize.py", "import decimal")
    write(site / "installed.py", "import fractions")
    write(tmp_path / "t.py", "import installed")
    run_cold(["python", "t.py"], tmp_path, {**STATIC, "PYTHONPATH": str(site)}, tmp_path / "record.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [line for line in lines if isinstance(line, str)] == ["installed"]


def test_two_tasks_of_one_spare_are_as_different_as_two_interpreters(tmp_path: Path) -> None:
    write(tmp_path / "t.py", """
        import multiprocessing, random, uuid, tempfile, numpy, numpy.random, os
        print(random.random()); print(numpy.random.rand()); print(uuid.uuid4()); print(tempfile.mktemp())
        print(multiprocessing.current_process().authkey.hex()); print(os.getpid())
    """)  # fmt: skip
    with Warm(["python", "t.py"], tmp_path, recorded(["python", "t.py"], tmp_path)) as warm:
        one, two = warm.run(), warm.run()
    assert one.code == two.code == 0, one.err
    assert all(a != b for a, b in zip(one.out.split(), two.out.split(), strict=True))


def test_a_sigint_raises_keyboard_interrupt_even_if_paceline_ignores_it(tmp_path: Path) -> None:
    """A shell makes its background jobs ignore SIGINT."""
    write(tmp_path / "t.py", """
        import os, signal, numpy
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print("interrupted")
    """)  # fmt: skip
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        endings = three_ways(["python", "t.py"], tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [(ended.code, ended.out.split()) for ended in endings] == [(0, ["True", "interrupted"])] * 3


ENDINGS: dict[str, tuple[str, int]] = {
    "exception": ("import numpy\ndef f():\n    raise ValueError('no')\nf()", 1),
    "syntax": ("import numpy\nx = (\n", 1),
    "chained": ("import numpy\ntry:\n    1/0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('x') from e", 1),
    "exit code": ("import sys, numpy\nsys.exit(7)", 7),
    "exit text": ("import sys, numpy\nsys.exit('bad day')", 1),
    "exit in a thread": ("import sys, threading, numpy\nthreading.Thread(target=sys.exit, args=(3,)).start()", 0),
    "interrupt": ("import numpy\nraise KeyboardInterrupt", -signal.SIGINT),
    "kill": ("import os, signal, numpy\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "import fails": ("import numpy\nimport no_such_module", 1),
    "import of a broken module": ("import numpy\nimport broken", 1),
    "end": (
        "import atexit, threading, time, numpy\natexit.register(print, 'atexit')\nprinted = threading.Event()\n"
        "def late():\n    printed.wait()\n    time.sleep(0.2)\n    print('thread')\n"
        "threading.Thread(target=late).start()\nprint('main')\nprinted.set()", 0),
    "warning": ("import warnings, numpy\nwarnings.warn('careful', stacklevel=2)\nwarnings.warn('again')", 0),
}  # fmt: skip


def test_programs_end_the_same_three_ways(tmp_path: Path) -> None:
    write(tmp_path / "broken.py", "import numpy\nraise RuntimeError('broken')\n")
    write(tmp_path / "first.py", "import numpy")
    # One spare for all: the program is read when the task starts.
    with Warm(["python", "t.py"], tmp_path, recorded(["python", "first.py"], tmp_path)) as warm:
        for name, (text, code) in ENDINGS.items():
            write(tmp_path / "t.py", text)
            plain = run_plain(["python", "t.py"], tmp_path)
            cold = run_cold(["python", "t.py"], tmp_path, record=tmp_path / "record.jsonl")
            from_spare = warm.run()
            assert plain.code == code, name
            assert [cold.code, cold.out, cold.err] == [plain.code, plain.out, plain.err], name
            assert [from_spare.code, from_spare.out, from_spare.err] == [plain.code, plain.out, plain.err], name


@pytest.mark.long
def test_torch_threads_run_once_more_before_the_interpreter_shuts_down(tmp_path: Path) -> None:
    """Otherwise a gloo thread that requests the GIL too late aborts the process: in a few of a hundred exits."""
    write(tmp_path / "t.py", """
        import atexit, os, sys, threading, torch
        reader, writer = os.pipe()
        def late():
            os.read(reader, 1)
            os.write(1, b"had its turn\\n")
        threading.Thread(target=late, daemon=True).start()
        sys.setswitchinterval(1000)  # it waits from here on
        atexit.register(os.write, writer, b".")
    """)  # fmt: skip
    _plain, cold, warm = three_ways(["python", "t.py"], tmp_path)
    for ended in (cold, warm):
        assert (ended.code, ended.out) == (0, "had its turn\n"), ended.err


def test_classes_of_main_can_be_sent_to_spawned_and_forked_processes(tmp_path: Path) -> None:
    write(tmp_path / "t.py", """
        import multiprocessing, pickle, numpy
        class Point:
            def __init__(self, x): self.x = x
        def work(point): return Point(point.x * 2 + int(numpy.ones(1)[0]))
        if __name__ == "__main__":
            assert pickle.loads(pickle.dumps(Point(3))).x == 3
            for method in ("spawn", "forkserver", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(work, [Point(1), Point(2)])[1].x)
    """)  # fmt: skip
    for ended in three_ways(["python", "t.py"], tmp_path):
        assert (ended.code, ended.out, ended.err) == (0, "spawn 5\nforkserver 5\nfork 5\n", "")


def test_a_record_lists_installed_modules_and_what_was_changed_before(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", "import numpy")
    write(tmp_path / "t.py", """
        import os, sys, importlib.util
        importlib.util.find_spec("torch")
        import mine
        os.environ["KERAS_BACKEND"] = 'j"\\u00e9\\n'
        del os.environ["HOME"]
        sys.path.insert(0, "/somewhere")
        import scipy.stats
    """)  # fmt: skip
    record = recorded(["python", "t.py"], tmp_path)
    names = [name for state in record for name in state.modules]
    assert names.index("numpy") < names.index("scipy.stats")
    assert len(set(names)) == len(names)
    assert not {"mine", "__main__", "torch"} & set(names)
    before = next(state for state in record if "numpy" in state.modules)
    after = next(state for state in record if "scipy.stats" in state.modules)
    assert (before.environment, before.path[0], before.late) == ({}, str(tmp_path), False)
    assert after.environment == {"KERAS_BACKEND": 'j"é\n', "HOME": None}
    assert after.path[:2] == ("/somewhere", str(tmp_path))


def test_a_record_lists_modules_that_are_still_being_imported(tmp_path: Path) -> None:
    """Importing a framework takes many seconds, and a spare may be started meanwhile."""
    write(tmp_path / "t.py", """
        import os, signal, sys, time
        below = []
        def hook(event, names):
            if event == "import" and names[0].startswith("numpy."):
                below.append(names[0])
                if len(below) == 10:
                    time.sleep(0.05)
                elif len(below) == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        import colorsys
        import numpy
    """)  # fmt: skip
    assert "numpy" in [name for state in recorded(["python", "t.py"], tmp_path) for name in state.modules]


def test_a_record_is_bounded_and_may_be_truncated(tmp_path: Path) -> None:
    state = json.dumps({"environment": {}, "path": ["/x"], "late": False}).encode()
    path = tmp_path / "record"
    path.write_bytes(b'"early"\n' + state + b'\n"numpy"\n\xff\n[1]\n{"a": 1}\n"json"\n"tens')
    assert [state.modules for state in starting.read_record(path)] == [("numpy", "json")]
    path.write_bytes(state + b"\n" + b'"numpy"\n' * 1_000_000)
    assert sum(len(state.modules) for state in starting.read_record(path)) < 600_000
    assert starting.read_record(tmp_path / "none") == ()


CHANGING = """
    import os, sys
    print("start", len(sys.argv))
    os.environ["COLOUR"] = os.environ["PACELINE_GENERATION"] if "{how}" == "environment" else "same"
    if "{how}" == "path":
        sys.path.insert(0, "/generation/" + os.environ["PACELINE_GENERATION"])
    os.environ["TF_CONFIG"] = "made of " + os.environ["RANK"]
    os.chdir("/")
    os.umask(0o77)
    import numpy
    print("numpy", numpy.ones(2).sum(), os.environ["COLOUR"])
"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("environment", "numpy is imported with different values of COLOUR than last time"),
        ("path", "numpy is imported with a different sys.path than last time"),
    ],
)
def test_a_program_that_prepares_its_imports_differently_restarts_cold(tmp_path: Path, how: str, reason: str) -> None:
    write(tmp_path / "t.py", CHANGING.replace("{how}", how))
    record = recorded(["python", "t.py", "x"], tmp_path, {**STATIC, **LATE, "PACELINE_GENERATION": "1"})
    with Warm(["python", "t.py", "x"], tmp_path, record) as warm:
        ended = warm.run()
        value = "2" if how == "environment" else "same"
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == f"start 2\nstart 2\nnumpy 2.0 {value}\n"
        assert ended.reports == [{"_": "cold", "why": reason}]
        same = warm.run({**STATIC, **LATE, "PACELINE_GENERATION": "1"})
        assert (same.code, same.reports) == (0, [])


def test_a_program_that_prepares_its_imports_as_before_stays_warm(tmp_path: Path) -> None:
    write(tmp_path / "t.py", CHANGING.replace("{how}", "same"))
    record = recorded(["python", "t.py", "x"], tmp_path, {**STATIC, **LATE, "RANK": "0"})
    with Warm(["python", "t.py", "x"], tmp_path, record) as warm:
        ended = warm.run()
    assert (ended.code, ended.out, ended.err, ended.reports) == (0, "start 2\nnumpy 2.0 same\n", "", [])


def test_a_program_that_has_threads_is_not_restarted(tmp_path: Path) -> None:
    write(tmp_path / "t.py", """
        import os, threading, time, numpy
        print("start")
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        os.environ["COLOUR"] = os.environ["PACELINE_GENERATION"]
        import scipy.stats
        print("end", scipy.stats.__name__)
    """)  # fmt: skip
    record = recorded(["python", "t.py"], tmp_path, {**STATIC, **LATE, "PACELINE_GENERATION": "1"})
    with Warm(["python", "t.py"], tmp_path, record) as warm:
        ended = warm.run()
    assert (ended.code, ended.out, ended.err) == (0, "start\nend scipy.stats\n", "")
    assert [report["_"] for report in ended.reports] == ["cold"]


def test_a_module_that_reads_a_late_variable_when_imported_is_not_reused(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    write(site / "curious.py", "import os\nRANK = os.environ.get('RANK')")
    write(tmp_path / "t.py", "import curious; print(curious.RANK)")
    env = {**STATIC, "PYTHONPATH": str(site)}
    record = recorded(["python", "t.py"], tmp_path, {**env, **LATE})
    with Warm(["python", "t.py"], tmp_path, record, env) as warm:
        ended = warm.run({**env, **LATE})
        assert (ended.code, ended.out, ended.err) == (0, "1\n", "")
        assert ended.reports == [{"_": "cold", "why": "curious reads RANK when it is imported"}]
        with pytest.raises(ValueError, match="PYTHONPATH cannot be changed in a spare"):
            warm.spare.start({**env, "PYTHONPATH": "/x"}, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            "Python thread",
        ),
        ("import subprocess\nchild = subprocess.Popen(['sleep', '1'])", "started a process"),
        ("import socket\nkept = socket.socket()", "opened socket:"),
        ("import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)", "signal handler"),
        ("import sys, io\nsys.stdout = io.StringIO()", "standard stream"),
        ("import os\nos.chdir('/')", "working folder"),
        ("import mine", "mine, which is not installed"),
    ],
    ids=["thread", "process", "socket", "signal", "stream", "folder", "own"],
)
def test_a_spare_reports_why_it_cannot_be_used(tmp_path: Path, text: str, reason: str) -> None:
    site = tmp_path / "site-packages"
    write(site / "odd.py", text)
    write(tmp_path / "mine.py", "")
    write(tmp_path / "t.py", "import odd")
    env = {**STATIC, "PYTHONPATH": str(site)}
    record = recorded(["python", "t.py"], tmp_path, env)
    with Warm(["python", "t.py"], tmp_path, record, env) as warm:
        assert isinstance(warm.state, Unfit)
        assert reason in warm.state.reason


def test_a_spare_killed_before_its_first_message_has_ended_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "t.py", "import json")
    record = recorded(["python", "t.py"], tmp_path)
    spawn = starting._spawn

    def spawn_and_kill(*arguments: Any) -> int:
        pid = spawn(*arguments)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    monkeypatch.setattr(starting, "_spawn", spawn_and_kill)
    with Warm(["python", "t.py"], tmp_path, record) as warm:
        assert warm.state == starting.Ended()


def test_side_effects_and_failures_of_imports_are_visible_to_the_program(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    write(site / "loud.py", """
        import os, sys, warnings, logging
        print("loud"); os.write(1, b"loud\\n")
        warnings.simplefilter("error"); os.environ["SET_BY_LOUD"] = "1"
        sys.setrecursionlimit(4321); logging.getLogger("loud").setLevel(5)
        try:
            import failing
        except ImportError:
            pass
    """)  # fmt: skip
    write(site / "failing.py", "import numpy\nraise ImportError('not today')")
    write(tmp_path / "t.py", """
        import logging, os, sys, warnings
        print([os.environ.get("SET_BY_LOUD"), sys.getrecursionlimit(), len(warnings.filters),
               "loud" in logging.root.manager.loggerDict])
        warnings.filterwarnings("ignore", "mine")
        import loud
        print([os.environ.get("SET_BY_LOUD"), sys.getrecursionlimit(), str(warnings.filters[:2]),
               "loud" in logging.root.manager.loggerDict, "numpy" in sys.modules, "failing" in sys.modules])
        try:
            import failing
        except ImportError as error:
            print(error)
    """)  # fmt: skip
    env = {**STATIC, "PYTHONPATH": str(site)}
    cold = run_cold(["python", "t.py"], tmp_path, env, tmp_path / "record.jsonl")
    with Warm(["python", "t.py"], tmp_path, starting.read_record(tmp_path / "record.jsonl"), env) as warm:
        ended = warm.run({**env, **LATE})
    assert (cold.code, cold.err) == (ended.code, ended.err) == (0, "")
    assert "loud\n" in cold.out
    assert ended.out == cold.out.replace("loud\n", "")  # it was printed when the spare imported it
    assert ended.reports == []


def test_the_user_s_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    write(tmp_path / "lib/sitecustomize.py", "import os\nos.environ['MINE'] = 'ran ' + os.environ.get('RANK', 'never')")
    write(tmp_path / "t.py", "import os, sys, numpy; print(os.environ['MINE'], sys.modules['sitecustomize'].__file__)")
    env = {**STATIC, "PYTHONPATH": str(tmp_path / "lib")}
    record = recorded(["python", "t.py"], tmp_path, {**env, **LATE})
    plain = run_plain(["python", "t.py"], tmp_path, {**env, **LATE})
    cold = run_cold(["python", "t.py"], tmp_path, {**env, **LATE}, tmp_path / "record.jsonl")
    with Warm(["python", "t.py"], tmp_path, record, env) as warm:
        ended = warm.run({**env, **LATE})
    assert plain.out == cold.out == ended.out == f"ran 1 {tmp_path}/lib/sitecustomize.py\n"


def test_site_files_are_unpacked_if_paceline_is_one_file(tmp_path: Path) -> None:
    package = Path(starting.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "agent.pyz", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
    write(tmp_path / "t.py", """
        import os, sys
        from paceline.agent.spares import spare
        from paceline.agent.tasks import python_command
        env = {"PACELINE_JAX_COORDINATOR": "127.0.0.1:1", "PATH": os.environ["PATH"]}
        code = "import sys; print(type(sys.meta_path[0]).__name__)"
        python = python_command.parse_command(["python", "-c", code], sys.executable)
        _, status = os.waitpid(spare.start_cold(python, env, "/", 1, 2, 0), 0)
        print(status, spare.site_folder().is_relative_to(os.environ["TMPDIR"]))
    """)  # fmt: skip
    (tmp_path / "tmp").mkdir()
    env = {**STATIC, "PYTHONPATH": str(tmp_path / "agent.pyz"), "TMPDIR": str(tmp_path / "tmp")}
    ended = run_plain(["python", "t.py"], tmp_path, env)
    assert (ended.code, ended.out, ended.err) == (0, "ImportHook\n0 True\n", "")


def test_a_command_that_cannot_be_executed_raises_an_error(tmp_path: Path) -> None:
    python = Python("/no/python", (), "script", "t.py", (), ("/no/python", "t.py"))
    write(tmp_path / "no-program", "")
    streams = Streams()
    with pytest.raises(FileNotFoundError):
        starting.start_cold(python, STATIC, str(tmp_path), *streams.task_fds)
    with pytest.raises(FileNotFoundError):
        starting.start_plain(["no-such-program"], STATIC, str(tmp_path), *streams.task_fds)
    with pytest.raises(FileNotFoundError):
        starting.start_plain(["true"], STATIC, str(tmp_path / "nowhere"), *streams.task_fds)
    with pytest.raises(PermissionError):
        starting.start_plain([str(tmp_path / "no-program")], STATIC, str(tmp_path), *streams.task_fds)
    streams.close()


def test_a_plain_program_gets_default_signals_and_four_descriptors(tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        streams = Streams()
        # The shell reads it itself: while it starts another program it blocks all signals for a moment.
        states = "while read -r line; do case $line in SigBlk*|SigIgn*) echo $line;; esac; done < /proc/$$/status"
        pid = starting.start_plain(["sh", "-c", f"{states}; ls /proc/$$/fd; cat"], STATIC, "/", *streams.task_fds)
        streams.release()
        ended = streams.end(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR2, previous)
    lines = ended.out.split()
    assert lines[:3] == ["SigBlk:", "0" * 16, "SigIgn:"]
    own = 0b11 << 31  # the C library's own signals, which posix_spawn leaves ignored in processes that make starts
    assert int(lines[3], 16) & ~own == 0
    assert [fd for fd in lines if fd.isdigit() and len(fd) < 4] == ["0", "1", "2", "3"]


def test_everything_dies_with_the_agent(tmp_path: Path) -> None:
    write(tmp_path / "t.py", "import numpy, time\nprint('up', flush=True)\ntime.sleep(600)")
    record = recorded(["python", "-c", "import numpy"], tmp_path)
    reader, writer = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            machine.become_subreaper()
            warm = Warm(["python", "t.py"], tmp_path, record)
            pids = [warm.spare.pid, warm.begin()[0], begin(["python", "t.py"], tmp_path, STATIC)[0]]
            os.write(writer, json.dumps(pids).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    processes = [psutil.Process(pid) for pid in json.loads(os.read(reader, 100))]
    assert [process.ppid() for process in processes] == [agent] * 3
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    for process in processes:  # orphans of a dead subreaper are ours
        os.waitpid(process.pid, 0)
    os.close(reader)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def environments(framework: str, size: int) -> list[dict[str, str]]:
    ports = free_ports(size)
    workers = [f"127.0.0.1:{port}" for port in ports]
    result = []
    for rank in range(size):
        late = {"PACELINE_RANK": str(rank), "PACELINE_WORLD_SIZE": str(size), "PACELINE_LOCAL_INDEX": "0"}
        if framework == "tensorflow":
            task = {"type": "worker", "index": rank}
            late["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        elif framework == "torch":
            late |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "RANK": str(rank)}
            late |= {"WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        else:
            late["PACELINE_JAX_COORDINATOR"] = workers[0]
        result.append({**STATIC, **late})
    return result


TORCH = """
    import os, sys, hashlib
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self): return 32
        def __getitem__(self, at): return torch.full((4,), at / 32.0)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for method in ("fork", "spawn") if dist.get_rank() == 0 else ("fork", "fork"):
            for rows in DataLoader(Rows(), batch_size=16, num_workers=1, multiprocessing_context=method):
                optimizer.zero_grad()
                model(rows + dist.get_rank()).square().mean().backward()
                optimizer.step()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        dist.destroy_process_group()
        print("weights", digest)
"""
PROGRAMS = Path(__file__).parent.parent / "programs"


@pytest.mark.parametrize(
    "framework", [*(pytest.param(name, marks=pytest.mark.long) for name in ("tensorflow", "torch")), "jax"]
)
def test_tasks_forked_from_one_spare_train_together_as_cold_ones_do(tmp_path: Path, framework: str) -> None:
    write(tmp_path / "ddp.py", TORCH)
    command = {
        "tensorflow": ["python", str(PROGRAMS / "tf_multiworker.py"), "--steps", "3"],
        "torch": ["python", "ddp.py"],
        "jax": ["python", str(PROGRAMS / "jax_allreduce.py"), "--steps", "3"],
    }[framework]
    started = [
        begin(command, tmp_path, env, tmp_path / f"record-{rank}")
        for rank, env in enumerate(environments(framework, 2))
    ]
    cold = [streams.end(pid) for pid, streams in started]
    assert [ended.code for ended in cold] == [0, 0], cold
    with Warm(command, tmp_path, starting.read_record(tmp_path / "record-0")) as warm:
        assert isinstance(warm.state, Ready) and warm.state.rss > 50 << 20 and warm.state.modules > 300
        for _ in range(2):
            started = [warm.begin(env) for env in environments(framework, 2)]
            ended = [streams.end(pid) for pid, streams in started]
            assert [(task.code, task.err, task.reports) for task in ended] == [(0, "", [])] * 2
            weights = {line for task in ended + cold for line in task.out.splitlines() if line.startswith("weights ")}
            assert len(weights) == 1, (ended, cold)


def test_jax_finds_the_run_in_python_processes_that_a_shell_starts(tmp_path: Path) -> None:
    write(tmp_path / "lib/sitecustomize.py", "print('mine')")
    program = f"{sys.executable} {PROGRAMS / 'jax_allreduce.py'} --steps 2"
    started = []
    for env in environments("jax", 2):
        streams = Streams()
        env["PYTHONPATH"] = str(tmp_path / "lib")
        started.append((starting.start_plain(["sh", "-c", program], env, str(tmp_path), *streams.task_fds), streams))
        streams.release()
    for rank, (pid, streams) in enumerate(started):
        ended = streams.end(pid)
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.startswith("mine\n") and f"rank {rank} of 2, 2 devices" in ended.out


def test_a_task_reports_how_far_its_start_has_come_cold_and_from_a_spare(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    write(site / "torch/__init__.py", "import torch.distributed")
    write(site / "torch/distributed/__init__.py", "from torch.distributed.distributed_c10d import init_process_group")
    write(site / "torch/distributed/distributed_c10d.py", "def init_process_group(backend): return backend + ' formed'")
    write(tmp_path / "t.py", """
        import os
        os.environ["PACELINE_REPORT_INODE"] = str(os.fstat(3).st_ino)
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
        if os.fork() == 0:
            dist.init_process_group("that of a child")
            os._exit(0)
        os.wait()
        print(dist.init_process_group("gloo"), dist.init_process_group is distributed_c10d.init_process_group)
    """)  # fmt: skip
    env = {**STATIC, "PYTHONPATH": str(site)}
    task = {**env, **LATE, "PACELINE_REPORT_FD": "3", "PACELINE_REPORT_INODE": "0"}
    cold = run_cold(["python", "t.py"], tmp_path, task, tmp_path / "record.jsonl")
    with Warm(["python", "t.py"], tmp_path, starting.read_record(tmp_path / "record.jsonl"), env) as warm:
        assert isinstance(warm.state, Ready) and warm.state.modules == 3
        from_spare = warm.run(task)
    for ended in (cold, from_spare):
        assert (ended.code, ended.out, ended.err) == (0, "gloo formed True\n", "")
        assert [(report["_"], report["stage"], report["framework"]) for report in ended.reports] == [
            ("start", "imported", "torch"), ("start", "joining", "torch"), ("start", "joined", "torch"),
        ]  # fmt: skip
    assert cold.reports[-1]["imports"] > 0 == from_spare.reports[-1]["imports"]


def test_an_incompatible_jax_is_not_modified(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    write(site / "jax/__init__.py", "")
    write(site / "jax/_src/__init__.py", "")
    write(site / "jax/_src/clusters.py", "X = 1")
    write(
        tmp_path / "t.py",
        "import jax._src.clusters as c; print(c.X, type(c.__loader__).__name__, c.__spec__.loader is c.__loader__)",
    )
    env = {**STATIC, "PYTHONPATH": str(site), "PACELINE_JAX_COORDINATOR": "127.0.0.1:1"}
    ended = run_cold(["python", "t.py"], tmp_path, env)
    assert (ended.code, ended.out) == (0, "1 SourceFileLoader True\n")
    assert len(ended.err.splitlines()) == 1 and "cannot register this run with JAX" in ended.err


# ---- standbys

CUDA = """
    #include <fcntl.h>
    #include <pthread.h>
    #include <stddef.h>
    #include <stdlib.h>
    #include <unistd.h>
    static int fd = -1;
    static void *idle(void *nothing) { for (;;) pause(); }
    int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 0 : 100; }
    int cuDeviceGet(int *handle, int device) { *handle = device; return device == 0 ? 0 : 101; }
    int cuDeviceGetAttribute(int *value, int attribute, int handle) {
        *value = atoi(getenv("CUDA_MODE")); return attribute == 20 ? 0 : 1;
    }
    int cuDevicePrimaryCtxRetain(void **context, int handle) {
        pthread_t thread;
        fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
        *context = &fd;
        return pthread_create(&thread, NULL, idle, NULL);
    }
    int cuCtxSetCurrent(void *context) { return context == NULL || context == &fd ? 0 : 201; }
    int cuMemGetInfo_v2(size_t *free, size_t *total) { *total = 100; *free = atoi(getenv("CUDA_FREE")); return 0; }
    int context_fd() { return fd; }
"""
CUDA_TASK = """
    import ctypes, os, sys
    import json
    fd = ctypes.CDLL(sys.argv[1]).context_fd()
    print(fd >= 0 and os.readlink(f"/proc/self/fd/{fd}"), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["RANK"])
    links = [f"/proc/self/fd/{number}" for number in range(4, 256)]
    files = [os.readlink(link) for link in links if os.path.islink(link)]
    print([file for file in files if f"paceline-stacks-{os.getpid()} " not in file])
"""
CUDA_VARIABLES = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MODE": "0", "CUDA_FREE": "50"}
USES_CUDA = "/dev/full"  # stands for the device that a process with a context has open


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the functions of CUDA's driver that a standby calls."""
    folder = tmp_path_factory.mktemp("cuda")
    source = write(folder / "cuda.c", CUDA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "cuda.so", source, "-lpthread"], check=True, timeout=60)
    return str(folder / "cuda.so")


def standbys_of(spare: Spare) -> list[psutil.Process]:
    return [each for each in psutil.Process(spare.pid).children(recursive=True) if each.num_threads() > 1]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long  # needs a C compiler
@pytest.mark.parametrize("times", [1, 2])
def test_a_standby_with_a_context_becomes_the_task(tmp_path: Path, cuda: str, times: int) -> None:
    write(tmp_path / "train.py", CUDA_TASK)
    command = ["python", "train.py", cuda]
    record = recorded(command, tmp_path, {**STATIC, **LATE, **CUDA_VARIABLES})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record) as warm:
        for number in range(times):
            for name in ("one", "other"):
                warm.spare.prepare(name, ContextOrder(CUDA_VARIABLES, 0, os.getpid(), cuda, USES_CUDA))
            wait_for(lambda: len(standbys_of(warm.spare)) == 2)
            waiting = {each.pid for each in standbys_of(warm.spare)}
            for name in ("one", "other"):
                pid, streams = warm.begin({**STATIC, **LATE, **CUDA_VARIABLES, "RANK": str(number)}, standby=name)
                ended = streams.end(pid)
                assert ended.out == f"/dev/zero 0 {number}\n['/dev/zero']\n", ended
                assert ended.code == 0
                assert pid in waiting
        ended = warm.run({**STATIC, **LATE, **CUDA_VARIABLES})
        assert ended.out == "False 0 1\n[]\n", "a task without a standby has no context"


@pytest.mark.long  # needs a C compiler
@pytest.mark.parametrize(
    ("variables", "device", "used"),
    [
        ({"CUDA_FREE": "9"}, 0, USES_CUDA),
        ({"CUDA_MODE": "3"}, 0, USES_CUDA),
        ({}, 1, USES_CUDA),
        ({}, 0, "/dev/nvidia-uvm"),
    ],
    ids=["training needs the memory", "one process per GPU", "no such device", "the program does not use CUDA"],
)
def test_a_standby_that_cannot_be_of_use_ends(
    tmp_path: Path, cuda: str, variables: dict[str, str], device: int, used: str
) -> None:
    write(tmp_path / "train.py", CUDA_TASK)
    command = ["python", "train.py", cuda]
    record = recorded(command, tmp_path, {**STATIC, **LATE, **CUDA_VARIABLES})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record) as warm:
        warm.spare.prepare("one", ContextOrder({**CUDA_VARIABLES, **variables}, device, os.getpid(), cuda, used))
        pid, streams = warm.begin({**STATIC, **LATE, **CUDA_VARIABLES}, standby="one")
        assert streams.end(pid).out == "False 0 1\n[]\n"


@pytest.mark.long  # needs a C compiler
def test_standbys_end_with_their_spare(tmp_path: Path, cuda: str) -> None:
    write(tmp_path / "train.py", CUDA_TASK)
    command = ["python", "train.py", cuda]
    record = recorded(command, tmp_path, {**STATIC, **LATE, **CUDA_VARIABLES})
    with open(USES_CUDA) as _, Warm(command, tmp_path, record) as warm:
        for name in ("one", "other"):
            warm.spare.prepare(name, ContextOrder(CUDA_VARIABLES, 0, os.getpid(), cuda, USES_CUDA))
        wait_for(lambda: len(standbys_of(warm.spare)) == 2)
        standbys = standbys_of(warm.spare)
        os.kill(warm.spare.pid, signal.SIGKILL)
        assert psutil.wait_procs(standbys, DEADLINE)[1] == []


# ---- imports that a spare leaves to the program

# A record may lack the last few milliseconds of imports: this takes longer, and imports a module afterwards.
SLOW_IMPORT = "import time\ntime.sleep(0.05)\nimport colorsys"


def test_a_module_that_opens_what_forks_cannot_share_is_named(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "site-packages"
    write(site / "opens.py", f"{SLOW_IMPORT}\nimport socket\nkept = socket.socket()\n")
    write(site / "harmless.py", "import json\n")
    write(tmp_path / "train.py", "import harmless, opens\nprint('opens' in __import__('sys').modules)\n")
    env = {**STATIC, "PYTHONPATH": str(site)}
    record = recorded(["python", "train.py"], tmp_path, {**env, **LATE})
    with Warm(["python", "train.py"], tmp_path, record, env) as warm:
        assert isinstance(warm.state, Unfit)
        assert warm.state.reason.startswith("an import opened socket:"), warm.state
        assert warm.state.module == "opens"
    with Warm(["python", "train.py"], tmp_path, starting.without(record, {"opens"}), env) as warm:
        assert warm.run({**env, **LATE}).out == "True\n"


def test_imports_that_ask_for_a_gpu_do_not_initialize_it(tmp_path: Path) -> None:
    """As modules that torch.compile imports do. A socket stands for what CUDA opens."""
    site = tmp_path / "lib" / "site-packages"
    write(site / "torch" / "__init__.py", "from torch import cuda")
    write(
        site / "torch" / "cuda.py",
        """
        import os, socket
        asked = []
        def is_available():
            asked.append(socket.socket())
            return os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
        """,
    )
    asks = "import torch.cuda\nfrom torch.cuda import is_available\nhas_gpu = is_available()"
    write(site / "torch" / "asks.py", f"{SLOW_IMPORT}\n{asks}")
    write(
        tmp_path / "train.py",
        """
        import torch, torch.asks
        print(torch.asks.has_gpu, len(torch.cuda.asked), torch.cuda.is_available.__module__)
        print(torch.asks.is_available(), torch.cuda.is_available(), len(torch.cuda.asked))
        """,
    )
    env = {**STATIC, "PYTHONPATH": str(site)}
    task = {**env, **LATE, "CUDA_VISIBLE_DEVICES": "4,5"}
    command = ["python", "train.py"]
    record = recorded(command, tmp_path, task)
    with Warm(command, tmp_path, record, env, devices=["4", "5"]) as warm:
        assert warm.run(task).out == "True 0 torch.cuda\nTrue True 2\n"
    with Warm(command, tmp_path, record, env) as warm:
        assert warm.run({**task, "CUDA_VISIBLE_DEVICES": ""}).out == "False 0 torch.cuda\nFalse False 2\n"
