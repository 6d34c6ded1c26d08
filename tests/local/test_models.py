"""`paceline try` and `paceline export`, as a user runs them: with programs without a framework and with each one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime import model_folder
from support import person
from support.model_servers import serving
from support.person import Person
from support.runs import PROGRAMS
from support.stores.servers import Store

# Saves steps 1 and 2 by the contract alone. `try` prints what it was given, `export` writes the file named by MODEL.
PROGRAM = """
import os, signal, sys, time, json
from pathlib import Path
mode, *rest = sys.argv[1:]
if mode == "train":
    for step in (1, 2):
        partial = Path(os.environ["PACELINE_SNAPSHOT_DIR"], "partial")
        partial.mkdir()
        (partial / "state").write_text(f"state of step {step}")
        (partial / "paceline.json").write_text(json.dumps({"metrics": {"loss": step}}))
        partial.rename(partial.with_name(f"step-{step}"))
        while step == 1 and not list(Path(os.environ["COMMITTED"]).glob("*/step-1-g1/manifest.json")):
            time.sleep(0.02)
    sys.exit()
state = Path(os.environ["PACELINE_RESTORE"], "state").read_text()
if mode == "try" and rest == ["wait"]:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
    print("waits", file=sys.stderr, flush=True)
    signal.pause()
if mode == "try":
    forbidden = {"TF_CONFIG", "RANK", "WORLD_SIZE", "PACELINE_SNAPSHOT_DIR", "PACELINE_RANK"} & set(os.environ)
    received = [state, os.environ["PACELINE_RUN"], os.environ["COLOUR"], Path.cwd().name, rest, sorted(forbidden)]
    print(json.dumps(received), flush=True)
    sys.stdout.write(sys.stdin.read().upper())
    print("words", file=sys.stderr)
    sys.exit(3 if rest == ["fail"] else 0)
print("exporting", flush=True)
folder = Path(os.environ["PACELINE_EXPORT_DIR"])
assert not list(folder.iterdir())
(folder / os.environ.get("MODEL", "model.pt2")).write_text(state)
print("half way", file=sys.stderr, flush=True)
if os.environ.get("HOW") == "wait":
    signal.pause()
sys.exit(int(os.environ.get("HOW", 0)))
"""


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Person]:
    user = Person(tmp_path)
    with person.nothing_left(user.home):
        yield user


def trained(me: Person, to: str, more: str = "", **env: str) -> str:
    """Trains a run with two snapshots at `to`; returns its ID."""
    (me.folder / "code").mkdir()
    (me.folder / "code" / "program.py").write_text(PROGRAM)
    (me.folder / "job.yaml").write_text(
        "name: digits\nframework: none\ncode: code\ncommand: [python, program.py, train]\n"
        f"env: {{COLOUR: blue, COMMITTED: {env.pop('COMMITTED', to)}}}\n"
        f"snapshots: {{to: '{to}', best: {{metric: loss, mode: min}}}}\n{more}"
    )
    result = me.call("run", **env)
    assert result.returncode == 0, result.stderr
    return me.run_folder().name


BOTH = "try: {command: [python, program.py, try]}\nexport: {command: [python, program.py, export]}\n"


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_try_gives_the_program_a_snapshot_and_is_replaced_by_it(me: Person) -> None:
    location = me.folder / "kept"
    location.mkdir()
    run = trained(me, str(location), BOTH)
    command = person.words_of("try", run, "--", "a b", "--snapshot")
    env = person.environment(me.home, TF_CONFIG="{}", RANK="3", PACELINE_RANK="3")
    result = subprocess.run(
        command, cwd="/", env=env, input="typed", capture_output=True, text=True, timeout=person.LIMIT_S
    )
    received, output = result.stdout.split("\n", 1)
    assert json.loads(received) == ["state of step 2", run, "blue", "code", ["a b", "--snapshot"], []]
    assert (output, result.stderr, result.returncode) == ("TYPED", "words\n", 0)
    assert me.call("try", run, "--", "fail").returncode == 3

    def state(*arguments: str) -> str:
        result = me.call("try", *arguments)
        assert result.returncode == 0, result.stderr
        return str(json.loads(result.stdout)[0])

    assert state("--snapshot", "1") == state(run, "--snapshot", "step-1-g1") == "state of step 1"
    assert state(run, "--snapshot", "best") == "state of step 1"
    assert state(run, "--snapshot", "newest") == "state of step 2"
    # What was fetched once is not fetched again.
    for path in location.glob("*/step-2-g1/*/state"):
        path.write_text("another")
    assert state(run) == "state of step 2"
    shutil.rmtree(me.home / "restored")
    result = me.call("try", run)
    assert (result.returncode, result.stdout) == (1, "") and "step-2-g1/worker-0/state is damaged" in result.stderr
    assert file_names(next((me.home / "restored").iterdir())) == {"step-2-g1.lock"}
    assert state(run, "--snapshot", "1") == "state of step 1"
    assert me.call("delete", run, "--yes").returncode == 0
    assert file_names(me.home / "restored") == set()


def test_missing_commands_snapshots_and_code_are_reported(me: Person) -> None:
    location = me.folder / "kept"
    location.mkdir()
    result = me.call("try", "digits", "--", "a")
    assert (result.returncode, result.stdout) == (2, "") and "there are no runs yet" in result.stderr
    run = trained(me, str(location))
    (me.folder / "with.yaml").write_text((me.folder / "job.yaml").read_text() + BOTH)

    def fails(*arguments: str) -> str:
        result = me.call(*arguments)
        assert (result.returncode, result.stdout) == (2, ""), result
        return result.stderr

    assert fails("try", run) == (
        f"error: the job of {run} has no `try`; add `try: {{command: [python, try.py]}}` to the job file "
        "and pass it with --job FILE\n"
    )
    assert fails("export", run, "--to", "model", "--job", "job.yaml") == (
        "error: job.yaml has no `export`; add `export: {command: [python, export.py]}` to the job file\n"
    )
    assert fails("export", run) == "error: --to DIR is required\n"
    # A job file with the command works for a run that was started without it, or from another machine.
    assert me.call("try", run, "--job", "with.yaml").returncode == 0
    assert "has no snapshot '7'; the nearest: step-2-g1" in fails("try", run, "--snapshot", "7", "--job", "with.yaml")
    assert "--code 'nowhere': no such folder" in fails("try", run, "--job", "with.yaml", "--code", "nowhere")
    (me.folder / "other").mkdir()
    other = Person(me.folder / "other")
    result = other.call("try", f"{location}/{run}")
    assert result.returncode == 2 and f"the job file of {run} is not on this machine" in result.stderr
    result = other.call("try", f"{location}/{run}", "--job", str(me.folder / "with.yaml"))
    assert result.returncode == 0 and json.loads(result.stdout)[0] == "state of step 2"
    (me.folder / "code").rename(me.folder / "moved")
    plan = me.home / "runs" / run / "plan.json"
    programs = {"try": {"command": ["python", "program.py", "try"], "env": {"COLOUR": "red"}}}
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "programs": programs}))
    assert fails("try", run) == (
        f"error: the job's code folder {me.folder}/code does not exist on this machine; "
        "pass a folder that contains the code with --code DIR\n"
    )
    result = me.call("try", run, "--code", "moved")
    assert json.loads(result.stdout)[2:4] == ["red", "moved"]
    shutil.rmtree(location / run)
    assert f"{run} has no snapshot at {location}/{run}" in fails("try", run, "--code", "moved")


def test_ctrl_c_ends_the_program_that_try_runs(me: Person) -> None:
    (me.folder / "kept").mkdir()
    trained(me, str(me.folder / "kept"), BOTH)
    terminal = me.terminal("try", "--", "wait")
    terminal.wait_for("waits")
    terminal.type("\x03")
    assert terminal.end() == 7


def test_an_export_exists_only_once_it_is_complete(me: Person) -> None:
    location = me.folder / "kept"
    location.mkdir()
    run = trained(me, str(location), BOTH)
    target = me.folder / "models" / "digits"
    before = file_names(me.folder)
    for exit_code, message in {
        "5": "the job's export.command ended with exit code 5; nothing was exported\n",
        "-9": "the job's export.command ended with exit code 247; nothing was exported\n",
    }.items():
        result = me.call("export", run, "--to", str(target), HOW=exit_code)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == f"exporting\nhalf way\nerror: {message}" and file_names(me.folder) == before
    result = me.call("export", run, "--to", str(target), MODEL="weights")
    assert result.returncode == 1 and file_names(me.folder) == before
    assert (
        "did not write exactly one model to PACELINE_EXPORT_DIR: expected a SavedModel (saved_model.pb), "
        in result.stderr
    )
    assert "model.pt2 or model.stablehlo, found weights\n" in result.stderr

    process = subprocess.Popen(
        person.words_of("export", run, "--to", str(target)), cwd=me.folder, stdin=subprocess.DEVNULL, text=True,
        env=person.environment(me.home, HOW="wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    with contextlib.closing(process.stderr):
        for line in process.stderr:
            if line == "half way\n":
                break
        assert not target.exists() and len(file_names(me.folder / "models")) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130 and file_names(me.folder) == before
    assert process.stdout is not None
    process.stdout.close()

    target.mkdir(parents=True)
    result = me.call("export", run, "--snapshot", "1", "--to", str(target))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert result.stderr == f"exporting\nhalf way\nexported step-1-g1 of {run} to {target}: pt2\n"
    assert file_names(target) == {"model.pt2", "paceline.json"} and file_names(me.folder / "models") == {"digits"}
    assert (target / "model.pt2").read_text() == "state of step 1"
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()
    assert json.loads((target / "paceline.json").read_text()) == {
        "format": "pt2", "run": run, "step": 1, "signatures": {},
    }  # fmt: skip
    result = me.call("export", run, "--to", str(target))
    assert (result.returncode, result.stderr) == (1, f"error: {target} already exists and is not an empty folder\n")


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_run_is_tried_and_exported_from_its_bucket(me: Person, s3: Store, tmp_path: Path) -> None:
    committed = me.folder / "shown"
    (committed / "a" / "step-1-g1").mkdir(parents=True)
    (committed / "a" / "step-1-g1" / "manifest.json").touch()  # the program need not wait here
    run = trained(me, s3.url, BOTH, COMMITTED=str(committed), **s3.options)
    result = me.call("try", run, **s3.options)
    assert json.loads(result.stdout)[0] == "state of step 2", result.stderr
    (tmp_path / "other").mkdir()
    other = Person(tmp_path / "other")
    arguments = [f"{s3.url}/{run}", "--job", str(me.folder / "job.yaml")]
    result = other.call("try", *arguments, **s3.options)
    assert json.loads(result.stdout)[0] == "state of step 2", result.stderr
    assert other.call("export", *arguments, "--to", "model", **s3.options).returncode == 0
    assert (other.folder / "model" / "model.pt2").read_text() == "state of step 2"
    # The bucket is only queried for the newest snapshot.
    assert file_names(other.home / "restored") and not list((other.home / "restored").glob("*/.*"))


SIGNATURE = {
    "inputs": {"image": {"dtype": "float32", "shape": [-1, 3]}},
    "outputs": {"logits": {"dtype": "float32", "shape": [-1, 2]}},
}
NUMBERS = ("1", "-2", "0.5")
FORMATS = {"tensorflow": "saved_model", "torch": "pt2", "jax": "stablehlo"}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FORMATS)
def test_an_exported_model_predicts_the_same_as_the_program(me: Person, framework: str) -> None:
    program = ["python", str(PROGRAMS / "models.py"), framework]
    job: dict[str, Any] = {"name": "small", "framework": framework, "command": [*program, "train", *NUMBERS]}
    job |= {"try": {"command": [*program, "try"]}, "export": {"command": [*program, "export"]}}
    (me.folder / "job.yaml").write_text(json.dumps(job))

    def call(*command: str) -> str:
        result = subprocess.run(
            command, cwd=me.folder, env=person.environment(me.home, TF_CPP_MIN_LOG_LEVEL="3"), capture_output=True,
            text=True, timeout=240,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    call(*person.words_of("run"))
    run = me.run_folder().name
    log = (me.run_folder() / "logs" / "worker-0.log").read_text()
    predictions = re.findall(r" \| (\[\[.*\])$", log, re.M)[-1]  # the framework may print more behind it
    assert call(*person.words_of("try", "--", *NUMBERS)).strip() == predictions
    call(*person.words_of("export", "--to", "model"))
    model = me.folder / "model"
    assert json.loads((model / model_folder.ABOUT).read_text()) == {
        "format": FORMATS[framework], "run": run, "step": 3, "signatures": {"serving_default": SIGNATURE},
    }  # fmt: skip
    loaded = call(sys.executable, str(PROGRAMS / "models.py"), framework, "load", str(model), *NUMBERS)
    expected = [pytest.approx(row, rel=1e-6, abs=1e-7) for row in json.loads(predictions)]
    assert json.loads(loaded) == expected
    model.rename(me.folder / "3")
    with serving(me.folder) as server:
        rows = [[float(number) * scale for scale in (1.0, 0.5, -1.0)] for number in NUMBERS]
        assert server.predict({"instances": rows}, "/versions/3").body["predictions"] == expected
        dim = [{"size": "-1", "name": ""}, {"size": "3", "name": ""}]
        signature = server.get("/metadata").body["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert signature["inputs"]["image"]["tensor_shape"]["dim"] == dim
