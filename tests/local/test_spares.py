"""A program cannot tell how it was started: by Python alone, recorded, or from a spare. Real forks."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import zipfile
from pathlib import Path

import psutil
import pytest

from paceline.agent import os_processes
from paceline.agent.spares import spare as starting
from paceline.agent.tasks.python_command import Python
from support.spare_processes import (
    LATE,
    STATIC,
    Streams,
    Warm,
    begin,
    recorded,
    run_cold,
    run_plain,
    three_ways,
    write,
)
from support.spare_processes import nothing_left as nothing_left
from support.spare_processes import parent_of_orphans as parent_of_orphans


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
            os_processes.become_subreaper()
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
