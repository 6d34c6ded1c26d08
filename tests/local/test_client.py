"""The Python API with real runs on this machine: they continue without their interpreter, and many threads use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import client
from support import person
from support.person import SHORT, STEADY, eventually

LIMIT_S = 120.0
MANY_LIMIT_S = 240.0  # for a hundred threads that share two cores

# Submits in a thread. A fork of this process, which has threads, would be an error.
SUBMITS = """
import sys, threading
from paceline import client

def refuse(event, arguments):
    if event in ("os.fork", "os.forkpty"):
        raise AssertionError("a process with threads is forked")

sys.addaudithook(refuse)
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
runs = []
submitting = threading.Thread(target=lambda: runs.append(client.submit(client.load("job.yaml"))))
submitting.start()
submitting.join()
print(runs[0].id)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    source = person.environment(home)["PYTHONPATH"]
    for name, value in {"PACELINE_HOME": str(home), "PYTHONPATH": source}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with person.nothing_left(home):
        yield home


def write_job(folder: Path, program: str, workers: int = 1) -> None:
    (folder / "train.py").write_text(program)
    fields = {"name": "digits", "framework": "none", "command": ["python", "train.py"]}
    (folder / "job.yaml").write_text(json.dumps({**fields, "roles": {"worker": {"replicas": workers}}}))


def job(folder: Path, program: str, workers: int = 1) -> client.Job:
    write_job(folder, program, workers)
    return client.load(folder / "job.yaml")


def test_a_run_continues_when_the_interpreter_that_started_it_ends(home: Path, tmp_path: Path) -> None:
    write_job(tmp_path, "import os; print(sorted(n for n in os.environ if n[:4] in ('JPY_', 'MPLB')))\n" + STEADY)
    jupyter = {"JPY_PARENT_PID": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    result = subprocess.run(
        [sys.executable, "-c", SUBMITS], cwd=tmp_path, env={**os.environ, **jupyter}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    run = client.get(result.stdout.strip())
    run.wait(timeout=LIMIT_S, until="step=3")
    info = json.loads((run.folder / "run.json").read_text())
    supervisor = psutil.Process(info["supervisor"])
    assert os.getsid(supervisor.pid) == supervisor.pid and info["detached"] is True
    assert next(run.logs(task="worker-0")).text == "[]"
    status = run.stop()
    assert (status.status, status.tasks[0].pid) == ("stopped", None)
    assert run.delete().kept_note == "" and client.runs().to_dict() == []


def test_a_killed_worker_is_followed(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children())  # those of other tests may end meanwhile
    run = client.submit(job(tmp_path, STEADY, workers=2))
    assert set(psutil.Process().children()) <= before, "its end would leave a zombie"
    kinds: list[str] = []
    resumed: set[str] = set()  # tasks; the stacks of one that has only just started cannot be shown
    for event in run.events(follow=True, timeout=LIMIT_S):
        if event.kind == "step" and "restart" in kinds:
            resumed.add(event.data["task"])
            if len(resumed) == 2:
                break
        elif event.kind == "step" and event.data["task"] == "worker-1" and "killed" not in kinds:
            pid = next(task.pid for task in run.status().tasks if task.name == "worker-1")
            assert pid is not None and pid > 1, "0 would be the group of this process"
            os.kill(pid, signal.SIGKILL)
            kinds.append("killed")
        kinds.append(event.kind)
    status = run.status()
    assert status.is_running and status.generations == 2 and status.restarts[0]["task"] == "worker-1"
    assert [process.task for process in run.stacks(task="worker-0").processes] == ["worker-0"]
    with pytest.raises(client.WaitTimeout):
        run.wait(timeout=0.1)
    assert run.stop(now=True).status == "stopped"
    points = run.series("loss", task="worker-1")
    assert {point.generation for point in points} == {1, 2} and all(0 < point.value <= 1 for point in points)
    assert capfd.readouterr() == ("", "")


def test_a_supervisor_that_does_not_start_is_an_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'this interpreter is broken' >&2\nexit 3\n")
    broken.chmod(0o755)
    submitted = job(tmp_path, SHORT)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(client.PacelineError, match="its supervisor ended: this interpreter is broken"):
        client.submit(submitted)
    assert list((home / "runs").iterdir()) == []


def test_a_hundred_threads(home: Path, tmp_path: Path) -> None:
    short = job(tmp_path, SHORT)
    submitted = threading.Semaphore(4)  # runs; more would only take longer
    all_ready = threading.Barrier(100)

    def use(number: int) -> list[Any]:
        all_ready.wait(MANY_LIMIT_S)
        if submitted.acquire(blocking=False):
            client.submit(short, run=f"digits-{number}")
        eventually(lambda: len(client.runs()) == 4, "four runs", MANY_LIMIT_S, pause=0.5)
        run = client.runs()[number % 4]
        run.status()
        kinds = [event.kind for event in run.events(follow=True, timeout=MANY_LIMIT_S)]
        status = run.wait(timeout=MANY_LIMIT_S)
        return [run.id, status.status, kinds[0], kinds[-1], [str(line) for line in run.logs()]]

    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(use, range(100)))
    assert len({result[0] for result in results}) == 4
    lines = [f"step {step}" for step in range(1, 6)]
    assert all(result[1:] == ["succeeded", "run-started", "run-ended", lines] for result in results)


def test_functions_run_as_source_and_with_cloudpickle(home: Path) -> None:
    factor = 7

    def source(steps: int) -> None:
        import paceline

        for step in range(1, steps + 1):
            paceline.report(step=step)
        print("rank", os.environ["PACELINE_RANK"])

    def pickled(steps: int) -> None:
        print("product", factor * steps)

    as_source = client.submit(source, workers=2, arguments={"steps": 3})
    as_pickle = client.submit(pickled, arguments={"steps": 6})
    assert as_source.notes == ("source is sent as source",)
    assert as_pickle.notes == ("pickled is sent with cloudpickle: it uses factor of the function around it",)
    status = as_source.wait(timeout=LIMIT_S)
    assert (status.status, status.steps) == ("succeeded", 3)
    assert sorted(str(line) for line in as_source.logs()) == ["rank 0", "rank 1"]
    assert as_pickle.wait(timeout=LIMIT_S).succeeded
    assert [str(line) for line in as_pickle.logs()] == ["product 42"]


def test_importing_the_client_imports_little(home: Path) -> None:
    heavy = ("pydantic", "ruamel", "lightkube", "obstore", "cryptography", "typer", "asyncio", "IPython")
    code = f"import sys; from paceline import client; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    training = "import sys, paceline; print([n for n in sys.modules if n.startswith('paceline.client')])"
    assert subprocess.check_output([sys.executable, "-c", training], text=True) == "[]\n"
