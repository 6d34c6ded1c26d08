"""What a spare imports: the record of a program, and imports that it leaves to the program."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.spares import spare as starting
from paceline.agent.spares.spare import Unfit
from support.spare_processes import (
    LATE,
    SLOW_IMPORT,
    STATIC,
    Warm,
    recorded,
    run_cold,
    write,
)
from support.spare_processes import nothing_left as nothing_left
from support.spare_processes import parent_of_orphans as parent_of_orphans


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
