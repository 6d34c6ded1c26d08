"""`paceline watch` in real terminals: golden screens, keys, sizes, signals, kills.

`UPDATE_SCREENS=1 python -m pytest tests/local/test_watch.py` writes the golden screens. Every test of a screen runs
in a pty, and in tmux with `make test-long`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.stores.folder import FolderStore
from support import committed, person, recorded
from support.person import Person
from support.recorded import supervised
from support.screens import FullScreen, Pty, opened, settled, wait_for, wait_until_gone

SCREENS = Path(__file__).parent / "watch_screens"
ENTER, ESCAPE, TAB, BACKSPACE, CTRL_C, CTRL_Z = "\r", "\x1b", "\t", "\x7f", "\x03", "\x1a"
DOWN, RIGHT, END = "\x1b[B", "\x1b[C", "\x1b[F"
TERMINALS = ["pty", pytest.param("tmux", marks=pytest.mark.long)]  # tmux is not on every machine
COLORS = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")
HOSTILE = r"\x1b]0;title\x07\x1b[2J\x1b[5Aand [red]markup[/red] [link=x]here[/] \u202ex"

GIB = 2**30


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def story(began: float) -> list[dict[str, Any]]:
    """The events of ten minutes: two workers, of which one is killed, and an evaluator."""
    workers = ["worker-0", "worker-1"]
    hosts = [*(f"{worker}-host" for worker in workers), "evaluator-0-host"]
    events: list[tuple[float, str, int, dict[str, Any]]] = [
        (0, "run-started", 0, {"run": committed.RUN, "tasks": [*workers, "evaluator-0"], "hosts": hosts}),
        (5, "generation-formed", 1, {"tasks": workers, "restore": None}),
        (6, "task-started", 1, {"task": "evaluator-0", "pid": 9, "warm": False, "host": "evaluator-0-host"}),
    ]
    for generation, first, last in ((1, 10, 300), (2, 310, 600)):
        for worker in workers:
            fields = {"task": worker, "pid": 7, "warm": generation == 2, "host": f"{worker}-host"}
            events.append((first - 2, "task-started", generation, fields))
            for second in range(first, last, 10):
                step = second // 10 if generation == 1 else second // 10 - 20
                metrics = {"loss": round(10 / (5 + step), 4), "total_steps": 100}
                speed = 0.1 + 0.01 * (second // 50 % 3)
                fields = {"task": worker, "step": step, "metrics": metrics, "steps_per_s": speed}
                events.append((second, "step", generation, fields))
    used = {"cpu": 1.9, "memory": 6 * GIB, "memory_peak": 7 * GIB, "read_bytes_per_s": 0, "written_bytes_per_s": 512}
    gpus = [{"utilization": 0.85, "memory": 30 * GIB, "memory_limit": 80 * GIB}]
    machine = {"memory": 7 * GIB, "memory_limit": 8 * GIB, "received_bytes_per_s": 0, "sent_bytes_per_s": 0}
    for worker in workers:
        fields = {"host": f"{worker}-host", "gpus": gpus, "machine": machine, "tasks": {worker: used}}
        events.append((590, "resources", 2, fields))
    scope = {"scope": workers, "delay_s": 0.0, "count": 1, "limit": 10}
    events += [
        (120, "committed", 1, {"step": 10, "snapshot": "step-10-g1", "bytes": 19 << 10, "took_s": 0.5}),
        (300, "task-exited", 1, {"task": "worker-1", "code": None, "signal": "SIGKILL", "expected": False}),
        (301, "restart", 1, {"cause": "signal", "task": "worker-1", "detail": "killed by SIGKILL", **scope}),
        (305, "generation-formed", 2, {"tasks": workers, "restore": "step-10-g1"}),
        (420, "committed", 2, {"step": 20, "snapshot": "step-20-g2", "bytes": 19 << 10, "took_s": 0.4}),
        (550, "committed", 2, {"step": 40, "snapshot": "step-40-g2", "bytes": 19 << 10, "took_s": 2.0}),
        (560, "evaluated", 2, {
            "task": "evaluator-0", "step": 40, "snapshot": "step-40-g2", "metrics": {"accuracy": 0.91},
            "best": {"snapshot": "step-40-g2", "metric": "accuracy", "value": 0.91},
        }),
    ]  # fmt: skip
    events.sort(key=lambda each: each[0])
    return [
        {"at": at(began + second), "event": kind, "generation": generation, **fields}
        for second, kind, generation, fields in events
    ]


def logs(began: float) -> dict[str, str]:
    def lines(generation: int, first: int, texts: list[str]) -> str:
        times = (at(began + first + number) for number in range(len(texts)))
        return "".join(f"{time} g{generation} | {text}\n" for time, text in zip(times, texts, strict=True))

    hostile = HOSTILE.encode().decode("unicode_escape")
    long_line = f"a line that is much longer than the screen {'.' * 60} the end"
    return {
        "worker-0": lines(2, 500, [f"step {step} of worker-0" for step in range(30, 40)]),
        "worker-1": lines(1, 250, [hostile, long_line]),
        "evaluator-0": lines(2, 570, ["accuracy 0.91"]),
    }


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a run that was stopped long ago, and one that is running; its curves depend on the time."""
    home = tmp_path / "home"
    (home / "runs").mkdir(parents=True)
    began = int(time.time()) - (3 * 24 + 13) * 3600 - 1800  # its age is as wide on every day: 3 d 13 h
    end = {"status": "stopped", "reason": "stopped by `paceline stop`", "cause": None}
    ended = {"at": at(began + 601), "event": "run-ended", "generation": 2, **end}
    folder = recorded.write(home, committed.RUN, [*story(began), ended], started=at(began), logs=logs(began))
    committed.life(FolderStore(str(folder / "snapshots")), tmp_path / "scratch")
    began = time.time() - 3 * 3600 - 620
    folder = recorded.write(home, "words-1a2b", story(began), started=at(began), logs=logs(began))
    committed.life(FolderStore(str(folder / "snapshots")), tmp_path / "more", "words-1a2b")
    return home


@pytest.fixture
def watch(home: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`watch(kind, *arguments)` opens a terminal with the view; all are closed at the end."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        numbers = iter(range(100))

        def start(kind: str, *arguments: str, size: tuple[int, int] = (80, 24), **env: str) -> Any:
            folder = tmp_path / f"terminal-{next(numbers)}"
            folder.mkdir()
            variables = person.environment(home, **{"TZ": "UTC", "LANG": "C.UTF-8", **env})
            variables.pop("LC_ALL", None)
            command = person.words_of("watch", *arguments)
            return stack.enter_context(opened(kind, command, folder, variables, size))

        yield start


def normalized(lines: list[str]) -> str:
    """Of a run that goes on, times and what depends on them differ each time."""
    text = "\n".join(lines)
    text = re.sub(r"\b3 h (\d+) min", lambda match: f"3 h {'M' * len(match[1])} min", text)
    text = re.sub(r"\b\d\d:\d\d:\d\d", "HH:MM:SS", text)
    text = re.sub(r"\b[A-Z][a-z]{2} \d\d \d\d:\d\d\b", "MON DD HH:MM", text)
    text = re.sub(r"  +\d+ d(?: \d+ h)?\b", "  DAYS", text)
    text = re.sub(r"goodput \d+\.\d%", "goodput N%", text)
    if "words-1a2b  running" in text:
        text = re.sub(r"(?m)^(loss|steps/s|gen) .*$", r"\1 CURVE", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def shows(view: FullScreen, name: str) -> None:
    """Waits until the screen is the golden one."""
    path = SCREENS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(normalized(settled(view)))
    golden = path.read_text()

    def describe() -> str:
        difference = difflib.unified_diff(golden.splitlines(), normalized(view.screen()).splitlines(), lineterm="")
        command = "UPDATE_SCREENS=1 python -m pytest tests/local/test_watch.py"
        return "\n".join([f"{path.name}; to update it: {command}", *difference])

    person.eventually(lambda: normalized(view.screen()) == golden, describe)


@pytest.mark.parametrize("kind", TERMINALS)
def test_the_screens_of_a_run(kind: str, watch: Callable[..., Any]) -> None:
    view = watch(kind, "digits")
    shows(view, "run")
    for keys, name in (
        ("l", "log"),
        (ESCAPE, "run"),
        (DOWN + DOWN + ENTER, "log-of-another-task"),
        (RIGHT + RIGHT + RIGHT, "log-shifted"),
        (ESCAPE, "run"),
        ("e", "events"),
        ("/commit" + ENTER, "events-filter"),
        (ESCAPE, "events"),
        (ESCAPE, "run"),
        ("?", "help"),
        (ESCAPE, "run"),
        ("/worker-1" + ENTER, "filter"),
        (ESCAPE, "run"),
        ("/(" + ENTER, "filter-that-is-wrong"),
        ("/" + BACKSPACE + ENTER, "run"),
        (TAB + "o", "order"),
        ("oooo" + TAB + "z", "zoom"),
        ("z", "run"),
        ("t", "range"),
        ("x", "not-running"),
        ("s", "no-stacks"),
        ("q", "not-running"),
    ):
        view.type(keys)
        shows(view, name)
    view.type("q")
    assert view.end() == 0
    assert view.is_sane()


@pytest.mark.parametrize("kind", TERMINALS)
def test_other_sizes(kind: str, watch: Callable[..., Any]) -> None:
    view = watch(kind, "digits")
    shows(view, "run")
    for size, name in (((120, 50), "run-120x50"), ((40, 12), "run-40x12"), ((80, 24), "run")):
        view.resize(*size)
        shows(view, name)
    view.type("q")
    assert view.end() == 0


@pytest.mark.parametrize("kind", TERMINALS)
def test_all_runs_and_one_that_goes_on(kind: str, home: Path, watch: Callable[..., Any]) -> None:
    with supervised(home / "runs" / "words-1a2b"):
        view = watch(kind)
        shows(view, "runs")
        for keys, name in (
            ("/running" + ENTER, "runs-filter"),
            (ENTER, "running"),
            ("x", "question"),
            ("nn", "running"),
            (ESCAPE, "runs-filter"),
            ("/stopped" + ENTER, "runs-filter-stopped"),
            ("x", "runs-not-running"),
        ):
            view.type(keys)
            shows(view, name)
        view.type("q")
        assert view.end() == 0


def test_keys_after_the_filter_are_for_the_screen(home: Path, watch: Callable[..., Any]) -> None:
    """A slow connection delivers many keys at once."""
    with supervised(home / "runs" / "words-1a2b"):
        view = watch("pty")
        shows(view, "runs")
        for typed, name in (
            ("/runnino" + BACKSPACE + "g" + ENTER + ENTER, "running"),
            (ESCAPE, "runs-filter"),
            ("/stopped" + ENTER + "x", "runs-not-running"),
            ("/x" + ESCAPE, "runs-not-running"),
            ("/running" + ENTER + "/stopped" + ENTER, "runs-not-running"),
        ):
            view.type(typed)
            shows(view, name)
        view.type("/stopped" + ENTER + "q")
        assert view.end() == 0


@pytest.mark.parametrize("kind", TERMINALS)
def test_a_terminal_without_colors_and_unicode(kind: str, watch: Callable[..., Any]) -> None:
    view = watch(kind, "digits", TERM="vt100")
    shows(view, "run-ascii")
    assert (SCREENS / "run-ascii.txt").read_text().isascii()
    view.type("q")
    assert view.end() == 0
    assert not isinstance(view, Pty) or not COLORS.search(view.raw)


def test_no_color(watch: Callable[..., Any]) -> None:
    for value, has_colors in (("1", False), ("", True)):
        view = watch("pty", "digits", NO_COLOR=value)
        shows(view, "run")
        view.type("q")
        assert view.end() == 0
        assert bool(COLORS.search(view.raw)) == has_colors


def test_output_cannot_control_the_terminal(watch: Callable[..., Any]) -> None:
    view = watch("pty", "digits")
    shows(view, "run")
    view.type("/markup" + ENTER)
    wait_for(view, "filter: markup")
    shown = r"worker-1 | \x1b]0;title\x07\x1b[2Jand [red]markup[/red] [link=x]here[/] \u202ex"
    wait_for(view, f"^{re.escape(shown)}$")
    view.type("q")
    assert view.end() == 0
    assert not re.search("\x1b\\]|\x07|\x1b\\[2J|\u202e", view.raw)


# ---- real runs


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Person]:
    (tmp_path / "mine").mkdir()
    user = Person(tmp_path / "mine")
    with person.nothing_left(user.home):
        yield user


def status(me: Person) -> str:
    return str(json.loads(me.call("status", "-o", "json").stdout)["status"])


@pytest.mark.parametrize("kind", TERMINALS)
def test_stacks_and_stop_of_a_real_run(kind: str, me: Person, tmp_path: Path) -> None:
    me.job(person.STEADY, workers=2)
    me.call("run", "--detach")
    with opened(kind, person.words_of("watch", "digits"), tmp_path, person.environment(me.home)) as view:
        wait_for(view, r"^worker-1 +running +worker-host-1 +1 +\d+")
        wait_for(view, r"^worker-\d \| step \d+")
        wait_for(view, r"^step \d+  [\d.]+ steps/s  loss")
        view.type("s")
        wait_for(view, r"train.py:\d+ in <module>")
        view.type(ESCAPE)
        wait_until_gone(view, r"^Esc back")  # two keys at once would be one
        wait_for(view, "q quit")
        view.type("x")
        wait_for(view, r"Its tasks have 30 s to finish")
        view.type("n")
        wait_until_gone(view, r"y: yes")
        wait_for(view, r"^worker-1 +running")
        assert status(me) == "running"
        view.type("x")
        wait_for(view, r"y: yes")
        view.type("y")
        wait_for(view, r"digits-\w+ has ended: stopped")
        wait_for(view, r"^worker-1 +(ended|succeeded)")
        assert status(me) == "stopped"
        view.type("x")
        wait_for(view, "is not running: stopped")
        view.type("q")
        assert view.end() == 0 and view.is_sane()


def test_a_run_that_is_deleted_meanwhile(home: Path, watch: Callable[..., Any]) -> None:
    view = watch("pty", "digits")
    wait_for(view, "digits-3f9a  stopped")
    shutil.rmtree(home / "runs" / "digits-3f9a")
    wait_for(view, "digits-3f9a  deleted")
    wait_for(view, "this run was deleted")
    view.type("l")
    wait_for(view, "digits-3f9a was deleted")
    view.type(ESCAPE)
    wait_for(view, "digits-3f9a  deleted")
    view.type("q")
    assert view.end() == 0


def test_a_cluster_that_hangs_up_does_not_end_the_view(watch: Callable[..., Any]) -> None:
    view = watch("pty", "digits")
    wait_for(view, "digits-3f9a  stopped")
    os.kill(view.pids()[1], signal.SIGPIPE)  # as the kernel does when a thread writes to a connection that was closed
    view.type("?")
    wait_for(view, "KEYS|Keys|keys")
    view.type("q")
    view.type("q")
    assert view.end() == 0


def test_a_thousand_tasks(home: Path, watch: Callable[..., Any]) -> None:
    tasks = [f"worker-{number}" for number in range(1000)]
    started = recorded.event(0, "run-started", 0, run="large-1000", tasks=tasks, hosts=tasks)
    steps = [recorded.event(3, "step", task=task, step=5) for task in tasks]
    output = {task: f"2026-11-15T04:30:05.000Z g1 | {task} prints\n" for task in tasks}
    folder = recorded.write(home, "large-1000", [started, recorded.FORMED, *steps], logs=output)
    with supervised(folder):
        view = watch("pty", "large")
        wait_for(view, r"1-\d of 1000")
        view.type(END)
        wait_for(view, r"^worker-999 +running")
        view.type("l")
        wait_for(view, "worker-999 prints")
        view.type("q")  # as Esc
        wait_for(view, r"9\d\d-1000 of 1000")
        view.type("q")
        assert view.end() == 0


# ---- its end


@pytest.mark.parametrize("kind", TERMINALS)
@pytest.mark.parametrize("victim", ["view", "parent"])
def test_a_killed_view_leaves_the_terminal_as_it_was(
    kind: str, victim: str, home: Path, watch: Callable[..., Any]
) -> None:
    view: FullScreen = watch(kind, "digits")
    wait_for(view, "digits-3f9a  stopped")
    parent, child = view.pids()
    os.kill(child if victim == "view" else parent, signal.SIGKILL)
    assert view.end() in (137, -signal.SIGKILL)
    person.eventually(view.is_sane, "the terminal is as it was")
    person.eventually(lambda: not Path(f"/proc/{child}").exists(), "the view has ended")
    if victim == "view":
        wait_for(view, "the view was killed by SIGKILL")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=str
)
def test_signals_end_the_view(number: signal.Signals, code: int, watch: Callable[..., Any]) -> None:
    view = watch("pty", "digits")
    wait_for(view, "digits-3f9a  stopped")
    os.kill(view.pids()[0], number)
    assert view.end() == code
    assert view.is_sane()


def test_ctrl_c_ends_the_view(watch: Callable[..., Any]) -> None:
    view = watch("pty", "digits")
    wait_for(view, "digits-3f9a  stopped")
    view.type(CTRL_C)
    assert view.end() == 0
    assert view.is_sane()


def test_a_terminal_that_closes_ends_the_view(watch: Callable[..., Any]) -> None:
    view = watch("pty", "digits")
    wait_for(view, "digits-3f9a  stopped")
    _, child = view.pids()
    view.hang_up()
    assert view.process.wait(person.LIMIT_S) != 0
    person.eventually(lambda: not Path(f"/proc/{child}").exists(), "the view has ended")


def test_a_view_that_does_not_end_after_a_signal_is_killed(home: Path, tmp_path: Path) -> None:
    program = (
        "import signal, time\n"
        "from paceline.watch import terminal_guard\n"
        "terminal_guard._END_WITHIN_S = 0.5\n"
        "terminal_guard.run_in_child()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('it ignores signals', flush=True)\n"
        "time.sleep(1000)\n"
    )
    with opened("pty", [sys.executable, "-c", program], tmp_path, person.environment(home)) as view:
        wait_for(view, "it ignores signals")
        os.kill(view.pids()[0], signal.SIGTERM)
        assert view.end() == 137
        assert view.is_sane()


def test_a_signal_that_comes_before_it_can_be_forwarded_is_not_lost(home: Path, tmp_path: Path) -> None:
    program = (
        "import signal, time\n"
        "from paceline.watch import terminal_guard\n"
        "wait = terminal_guard._wait\n"
        "def late(*arguments):\n"
        "    while signal.SIGTERM not in signal.sigpending():\n"
        "        time.sleep(0.01)\n"
        "    wait(*arguments)\n"
        "terminal_guard._wait = late\n"
        "terminal_guard.run_in_child()\n"
        "print('the view', flush=True)\n"
        "time.sleep(1000)\n"
    )
    with opened("pty", [sys.executable, "-c", program], tmp_path, person.environment(home)) as view:
        wait_for(view, "the view")
        os.kill(view.pids()[0], signal.SIGTERM)
        assert view.end() == 143
        wait_for(view, "the view was killed by SIGTERM")


def test_a_bug_is_reported_after_the_terminal_is_restored(home: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from paceline.cli import main\n"
        "from paceline.watch import run_screen_model\n"
        "def broken(*arguments):\n"
        "    raise ZeroDivisionError('a bug')\n"
        "run_screen_model.title = broken\n"
        "sys.argv[1:] = ['watch', 'digits']\n"
        "main()\n"
    )
    with opened("pty", [sys.executable, "-c", program], tmp_path, person.environment(home)) as view:
        assert view.end() == 1
        assert view.is_sane()
        wait_for(view, "this is a bug in Paceline: ZeroDivisionError: a bug")


@pytest.mark.long  # job control needs a shell
def test_ctrl_z_suspends_the_view_and_the_shell_continues_it(watch: Callable[..., Any]) -> None:
    view = watch("tmux", "digits")
    wait_for(view, "digits-3f9a  stopped")
    view.type(CTRL_Z)
    wait_for(view, r"Stopped|suspended")
    view.type("fg" + ENTER)
    wait_for(view, "digits-3f9a  stopped")
    view.type("q")
    wait_for(view, r"\$$")
    person.eventually(view.is_sane, "the terminal is as it was")


def test_other_commands_do_not_import_textual(home: Path) -> None:
    code = (
        "import sys\n"
        "from paceline.cli import app\n"
        "from paceline.watch import run_screen_reader, runs_screen_reader, terminal_guard\n"
        "app.main(['ls'])\n"
        "app.main(['watch', '--help'])\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('textual', 'rich')]\n"
    )
    environment = person.environment(home)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
