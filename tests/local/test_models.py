"""`paceline try` and `paceline export`, as a person uses them: with programs that know no framework, and with each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime import exporting
from support import person
from support.model_servers import serving
from support.person import Person
from support.runs import PROGRAMS
from support.stores.servers import Store

# Saves steps 1 and 2 by the contract alone; to try it tells what it was given, to export it writes what it is told to.
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
    told = [state, os.environ["PACELINE_RUN"], os.environ["COLOUR"], Path.cwd().name, rest, sorted(forbidden)]
    print(json.dumps(told), flush=True)
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
    someone = Person(tmp_path)
    with person.nothing_left(someone.home):
        yield someone


def trained(me: Person, to: str, more: str = "", **env: str) -> str:
    """The id of a run with two snapshots there."""
    (me.folder / "code").mkdir()
    (me.folder / "code" / "program.py").write_text(PROGRAM)
    (me.folder / "job.yaml").write_text(
        "name: digits\nframework: none\ncode: code\ncommand: [python, program.py, train]\n"
        f"env: {{COLOUR: blue, COMMITTED: {env.pop('COMMITTED', to)}}}\n"
        f"snapshots: {{to: '{to}', best: {{metric: loss, mode: min}}}}\n{more}"
    )
    done = me.call("run", **env)
    assert done.returncode == 0, done.stderr
    return me.run_folder().name


BOTH = "try: {command: [python, program.py, try]}\nexport: {command: [python, program.py, export]}\n"


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_try_gives_the_program_a_snapshot_and_is_the_program_from_then_on(me: Person) -> None:
    place = me.folder / "kept"
    place.mkdir()
    run = trained(me, str(place), BOTH)
    words = person.words_of("try", run, "--", "a b", "--snapshot")
    env = person.environment(me.home, TF_CONFIG="{}", RANK="3", PACELINE_RANK="3")
    done = subprocess.run(words, cwd="/", env=env, input="typed", capture_output=True, text=True, timeout=60)
    told, rest = done.stdout.split("\n", 1)
    assert json.loads(told) == ["state of step 2", run, "blue", "code", ["a b", "--snapshot"], []]
    assert (rest, done.stderr, done.returncode) == ("TYPED", "words\n", 0)
    assert me.call("try", run, "--", "fail").returncode == 3

    def state(*words: str) -> str:
        done = me.call("try", *words)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)[0])

    assert state("--snapshot", "1") == state(run, "--snapshot", "step-1-g1") == "state of step 1"
    assert state(run, "--snapshot", "best") == "state of step 1"
    assert state(run, "--snapshot", "newest") == "state of step 2"
    # What was fetched once is not fetched again.
    for path in place.glob("*/step-2-g1/*/state"):
        path.write_text("another")
    assert state(run) == "state of step 2"
    shutil.rmtree(me.home / "restored")
    done = me.call("try", run)
    assert (done.returncode, done.stdout) == (1, "") and "step-2-g1/worker-0/state is damaged" in done.stderr
    assert left(next((me.home / "restored").iterdir())) == {"step-2-g1.lock"}
    assert state(run, "--snapshot", "1") == "state of step 1"
    assert me.call("delete", run, "--yes").returncode == 0
    assert left(me.home / "restored") == set()


def test_what_is_missing_is_told(me: Person) -> None:
    place = me.folder / "kept"
    place.mkdir()
    done = me.call("try", "digits", "--", "a")
    assert (done.returncode, done.stdout) == (2, "") and "there are no runs yet" in done.stderr
    run = trained(me, str(place))
    (me.folder / "with.yaml").write_text((me.folder / "job.yaml").read_text() + BOTH)

    def fails(*words: str) -> str:
        done = me.call(*words)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr

    assert fails("try", run) == (
        f"error: the job of {run} says nothing of `try`: write `try: {{command: [python, try.py]}}` into the job file, "
        "and give that with --job FILE\n"
    )
    assert fails("export", run, "--to", "model", "--job", "job.yaml") == (
        "error: job.yaml says nothing of `export`: write `export: {command: [python, export.py]}` into the job file\n"
    )
    assert fails("export", run) == "error: say where to: --to DIR\n"
    # A job file that has the command does for a run that was started without it, or from another machine.
    assert me.call("try", run, "--job", "with.yaml").returncode == 0
    assert "has no snapshot '7'; the nearest: step-2-g1" in fails("try", run, "--snapshot", "7", "--job", "with.yaml")
    assert "--code nowhere: there is no such folder" in fails("try", run, "--job", "with.yaml", "--code", "nowhere")
    (me.folder / "other").mkdir()
    other = Person(me.folder / "other")
    done = other.call("try", f"{place}/{run}")
    assert done.returncode == 2 and f"{run} was not started from this machine" in done.stderr
    done = other.call("try", f"{place}/{run}", "--job", str(me.folder / "with.yaml"))
    assert done.returncode == 0 and json.loads(done.stdout)[0] == "state of step 2"
    (me.folder / "code").rename(me.folder / "moved")
    planned = me.home / "runs" / run / "plan.json"
    programs = {"try": {"command": ["python", "program.py", "try"], "env": {"COLOUR": "red"}}}
    planned.write_text(json.dumps({**json.loads(planned.read_text()), "programs": programs}))
    assert fails("try", run) == (
        f"error: the job's code folder {me.folder}/code is not here: say which one has it, with --code DIR\n"
    )
    done = me.call("try", run, "--code", "moved")
    assert json.loads(done.stdout)[2:4] == ["red", "moved"]
    shutil.rmtree(place / run)
    assert f"{run} has no snapshot at {place}/{run}" in fails("try", run, "--code", "moved")


def test_ctrl_c_ends_the_program_that_is_tried(me: Person) -> None:
    (me.folder / "kept").mkdir()
    trained(me, str(me.folder / "kept"), BOTH)
    terminal = me.terminal("try", "--", "wait")
    terminal.wait_for("waits")
    terminal.type("\x03")
    assert terminal.end() == 7


def test_an_export_is_there_when_it_is_whole_and_not_before(me: Person) -> None:
    place = me.folder / "kept"
    place.mkdir()
    run = trained(me, str(place), BOTH)
    target = me.folder / "models" / "digits"
    before = left(me.folder)
    for how, words in {
        "5": "the job's export ended with exit code 5; nothing was exported\n",
        "-9": "the job's export ended with exit code 247; nothing was exported\n",
    }.items():
        done = me.call("export", run, "--to", str(target), HOW=how)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"exporting\nhalf way\nerror: {words}" and left(me.folder) == before
    done = me.call("export", run, "--to", str(target), MODEL="weights")
    assert done.returncode == 1 and left(me.folder) == before
    assert (
        "has left no model in PACELINE_EXPORT_DIR: a SavedModel (saved_model.pb), model.pt2 or model.stablehlo is "
        in done.stderr
    )
    assert "looked for, weights found\n" in done.stderr

    started = subprocess.Popen(
        person.words_of("export", run, "--to", str(target)), cwd=me.folder, stdin=subprocess.DEVNULL, text=True,
        env=person.environment(me.home, HOW="wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert started.stderr is not None
    with contextlib.closing(started.stderr):
        for line in started.stderr:
            if line == "half way\n":
                break
        assert not target.exists() and len(left(me.folder / "models")) == 1
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 130 and left(me.folder) == before
    assert started.stdout is not None
    started.stdout.close()

    target.mkdir(parents=True)
    done = me.call("export", run, "--snapshot", "1", "--to", str(target))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == f"exporting\nhalf way\nstep-1-g1 of {run} is exported to {target}: pt2\n"
    assert left(target) == {"model.pt2", "paceline.json"} and left(me.folder / "models") == {"digits"}
    assert (target / "model.pt2").read_text() == "state of step 1"
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()
    assert json.loads((target / "paceline.json").read_text()) == {
        "format": "pt2", "run": run, "step": 1, "signatures": {},
    }  # fmt: skip
    done = me.call("export", run, "--to", str(target))
    assert (done.returncode, done.stderr) == (1, f"error: {target} is there already, and not an empty folder\n")


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@pytest.mark.timeout(180)
def test_a_run_is_tried_and_exported_from_its_bucket(me: Person, s3: Store, tmp_path: Path) -> None:
    shown = me.folder / "shown"
    (shown / "a" / "step-1-g1").mkdir(parents=True)
    (shown / "a" / "step-1-g1" / "manifest.json").touch()  # the program need not wait here
    run = trained(me, s3.url, BOTH, COMMITTED=str(shown), **s3.options)
    done = me.call("try", run, **s3.options)
    assert json.loads(done.stdout)[0] == "state of step 2", done.stderr
    (tmp_path / "other").mkdir()
    other = Person(tmp_path / "other")
    words = [f"{s3.url}/{run}", "--job", str(me.folder / "job.yaml")]
    done = other.call("try", *words, **s3.options)
    assert json.loads(done.stdout)[0] == "state of step 2", done.stderr
    assert other.call("export", *words, "--to", "model", **s3.options).returncode == 0
    assert (other.folder / "model" / "model.pt2").read_text() == "state of step 2"
    # Nothing is asked of the bucket but which snapshot is the newest.
    assert left(other.home / "restored") and not list((other.home / "restored").glob("*/.*"))


SIGNATURE = {
    "inputs": {"image": {"dtype": "float32", "shape": [-1, 3]}},
    "outputs": {"logits": {"dtype": "float32", "shape": [-1, 2]}},
}
NUMBERS = ("1", "-2", "0.5")
FORMATS = {"tensorflow": "saved_model", "torch": "pt2", "jax": "stablehlo"}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", FORMATS)
def test_an_exported_model_gives_what_the_program_itself_gives(me: Person, framework: str) -> None:
    program = ["python", str(PROGRAMS / "models.py"), framework]
    job: dict[str, Any] = {"name": "small", "framework": framework, "command": [*program, "train", *NUMBERS]}
    job |= {"try": {"command": [*program, "try"]}, "export": {"command": [*program, "export"]}}
    (me.folder / "job.yaml").write_text(json.dumps(job))

    def call(*words: str) -> str:
        done = subprocess.run(
            words, cwd=me.folder, env=person.environment(me.home, TF_CPP_MIN_LOG_LEVEL="3"), capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    call(*person.words_of("run"))
    run = me.run_folder().name
    trained = (me.run_folder() / "logs" / "worker-0.log").read_text().splitlines()[-1].partition(" | ")[2]
    assert call(*person.words_of("try", "--", *NUMBERS)).strip() == trained
    call(*person.words_of("export", "--to", "model"))
    model = me.folder / "model"
    assert json.loads((model / exporting.ABOUT).read_text()) == {
        "format": FORMATS[framework], "run": run, "step": 3, "signatures": {"serving_default": SIGNATURE},
    }  # fmt: skip
    loaded = call(sys.executable, str(PROGRAMS / "models.py"), framework, "load", str(model), *NUMBERS)
    expected = [pytest.approx(row, rel=1e-6, abs=1e-7) for row in json.loads(trained)]
    assert json.loads(loaded) == expected
    model.rename(me.folder / "3")
    with serving(me.folder) as server:
        rows = [[float(number) * scale for scale in (1.0, 0.5, -1.0)] for number in NUMBERS]
        assert server.predict({"instances": rows}, "/versions/3").body["predictions"] == expected
        dim = [{"size": "-1", "name": ""}, {"size": "3", "name": ""}]
        known = server.get("/metadata").body["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert known["inputs"]["image"]["tensor_shape"]["dim"] == dim
