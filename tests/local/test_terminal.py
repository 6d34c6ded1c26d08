"""At a real terminal: colors, the live line, progress bars in place, Ctrl-C, a terminal that closes."""

import json
import os
import re
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.storage.stores.folder import FolderStore
from support import committed, person, recorded
from support.person import BAR, DEAF, SHORT, STEADY, Person, rendered

CTRL_C = "\x03"
STAYS = "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\n"


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Person]:
    user = Person(tmp_path)
    with person.nothing_left(user.home):
        yield user


def test_prefixes_are_colored_and_the_live_line_is_removed_at_the_end(me: Person) -> None:
    me.job(SHORT + STAYS, workers=2)
    terminal = me.terminal("run")
    terminal.wait_for(r"digits-[0-9a-z]{6}: generation 1, step 5, loss 0\.2, .*0 restarts, 0:\d\d")
    (me.folder / "go").touch()
    assert terminal.end() == 0
    assert "\x1b[36mworker-0 |\x1b[0m step 1" in terminal.raw and "\x1b[32mworker-1 |\x1b[0m step 1" in terminal.raw
    assert not [line for line in terminal.screen if "generation 1, step" in line]
    run = me.run_folder().name
    lines = [line for line in terminal.screen if line]
    assert [line for line in lines if line.startswith("worker-0")] == [f"worker-0 | step {i}" for i in range(1, 6)]
    assert lines[-1].split() == ["next", "paceline", "status", run]


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_colors_can_be_turned_off(me: Person, setting: dict[str, str]) -> None:
    me.job("print('\\x1b[31mred\\x1b[0m')")
    terminal = me.terminal("run", **setting)
    assert terminal.end() == 0
    assert "worker-0 | red" in terminal.screen or "TERM" in setting
    own = terminal.raw.replace("\x1b[31mred\x1b[0m", "red") if "TERM" in setting else terminal.raw
    assert not re.search(r"\x1b\[[0-9;]*m", own)


def test_output_of_a_program_cannot_control_the_terminal(me: Person) -> None:
    """Neither what it prints, nor the text of its exception, which is shown as the reason of the failure."""
    program = r"""
print("\x1b]0;title\x07\x1b[5Aclean \x1b[32mgreen")
raise ValueError("\x1b]52;c;bHM=\x07\x1b[2J\x1b[>4m")
"""
    me.job(program)
    terminal = me.terminal("run", "--set", "restart.limit=0")
    assert terminal.end() == 1
    assert "clean \x1b[32mgreen\x1b[0m" in terminal.raw
    assert r"worker-0 | \x1b]0;title\x07clean green" in terminal.screen
    shown = terminal.raw
    for verb in (["status"], ["events"], ["ls", "-o", "wide"], ["logs"]):
        reader = me.terminal(*verb)
        assert reader.end() == 0
        assert r"ValueError: \x1b]52;c;bHM=\x07\x1b[2J\x1b[>4m" in reader.raw
        shown += reader.raw
    assert not re.search(r"\x1b\]|\x1b\[2J|\x1b\[>|\x07", shown)


def test_a_progress_bar_is_replaced_in_place(me: Person) -> None:
    me.job(BAR.replace("    time.sleep(0.12)\n", textwrap.indent(STAYS, "    ")))
    terminal = me.terminal("run")
    terminal.wait_for("0% of the bar")
    (me.folder / "go").touch()
    assert terminal.end() == 0
    bars = [line for line in terminal.screen if "of the bar" in line]
    assert bars == ["worker-0 | 100% of the bar"]
    assert len(set(re.findall(r"\d+% of the bar", terminal.raw))) > 1
    piped = me.call("logs").stdout
    assert piped == "worker-0 | 100% of the bar\nworker-0 | after the bar\n"


def test_logs_at_a_terminal(me: Person) -> None:
    me.job(BAR, workers=2)
    me.call("run", "--detach")
    terminal = me.terminal("logs", "-f")
    assert terminal.end() == 0
    lines = [line for line in terminal.screen if line]
    assert sorted(lines) == sorted(
        f"worker-{i} | {text}" for i in (0, 1) for text in ("100% of the bar", "after the bar")
    )
    assert "\x1b[36mworker-0 |\x1b[0m after" in terminal.raw


def test_ctrl_c_lets_tasks_finish(me: Person) -> None:
    me.job(STEADY, workers=2)
    terminal = me.terminal("run")
    for task in ("worker-0", "worker-1"):
        terminal.wait_for(rf"{task} \|\S* step 3")
    terminal.type(CTRL_C)
    assert terminal.end() == 130
    lines = terminal.screen
    assert any("stopping: tasks have 30 s to finish; press Ctrl-C again to kill them" in line for line in lines)
    assert {"worker-0 | asked to end", "worker-1 | asked to end"} <= set(lines)
    assert json.loads((me.run_folder() / "report.json").read_text())["status"] == "stopped"


def test_ctrl_c_twice_kills_immediately(me: Person) -> None:
    me.job(DEAF)
    terminal = me.terminal("run")
    terminal.wait_for("step 3")
    terminal.type(CTRL_C)
    terminal.wait_for("press Ctrl-C again to kill them")
    began = time.monotonic()
    person.a_moment_later(began)
    terminal.type(CTRL_C)
    assert terminal.end() == 130
    assert time.monotonic() - began < 25  # less than the grace of 30 s
    assert any("killing all tasks" in line for line in terminal.screen)


def test_a_terminal_that_closes_stops_the_run(me: Person) -> None:
    me.job(STEADY)
    terminal = me.terminal("run")
    terminal.wait_for("step 3")
    assert terminal.hang_up() == 130
    assert json.loads((me.run_folder() / "report.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize("verb", ["logs", "events"])
def test_ctrl_c_ends_a_reader_and_not_the_run(me: Person, verb: str) -> None:
    me.job(STEADY)
    me.call("run", "--detach")
    terminal = me.terminal(verb, "-f")
    terminal.wait_for("step 3")
    terminal.type(CTRL_C)
    assert terminal.end() == 130
    assert "Traceback" not in terminal.raw
    assert json.loads(me.call("status", "-o", "json").stdout)["status"] == "running"
    assert me.call("stop").returncode == 0


def test_delete_asks_for_confirmation(me: Person) -> None:
    me.job(SHORT)
    me.call("run")
    for answer, code in (("n", 1), ("", 1), ("y", 0)):
        terminal = me.terminal("delete", "digits")
        terminal.wait_for(
            r"delete digits-[0-9a-z]{6} with all logs and TensorBoard files\? Committed snapshots are kept\. \[y/N\] "
        )
        terminal.type(answer + "\n")
        assert terminal.end() == code
        assert bool(os.listdir(me.home / "runs")) == (code == 1)  # noqa: PTH208


@pytest.fixture
def snapshots(me: Person) -> Path:
    """The snapshots of a run that has ended, in its own folder."""
    folder = recorded.write(me.home, committed.RUN, report=recorded.REPORT)
    committed.life(FolderStore(str(folder / "snapshots")), me.folder / "scratch")
    return folder / "snapshots"


def test_delete_with_snapshots_asks_for_confirmation(me: Person, snapshots: Path) -> None:
    for answer, code in (("n", 1), ("y", 0)):
        terminal = me.terminal("delete", "--snapshots", "digits")
        terminal.wait_for(r"delete digits-3f9a with all logs, TensorBoard files and snapshots\? \[y/N\] ")
        terminal.type(answer + "\n")
        assert terminal.end() == code
        assert snapshots.exists() == (code == 1)


def test_deleting_remaining_snapshots_of_a_run_asks_for_confirmation(me: Person, snapshots: Path) -> None:
    me.call("delete", "digits", "--yes")
    terminal = me.terminal("delete", "--snapshots", "digits")
    terminal.wait_for(r"delete all snapshots of digits-3f9a\? \[y/N\] ")
    terminal.type("y\n")
    assert terminal.end() == 0
    assert not snapshots.exists()


def test_delete_says_which_snapshots_cannot_be_kept(me: Person) -> None:
    folder = recorded.write(me.home, committed.RUN, report=recorded.REPORT)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "on": "kubernetes"}))
    terminal = me.terminal("delete", "digits")
    terminal.wait_for(r"Committed snapshots are kept, except those in the captain's pod of digits-3f9a\. \[y/N\] ")
    terminal.type("n\n")
    assert terminal.end() == 1 and folder.exists()


def test_snapshots_rm_asks_for_confirmation(me: Person, snapshots: Path) -> None:
    for answer, code in (("n", 1), ("y", 0)):
        terminal = me.terminal("snapshots", "rm", "digits", "10", "step-20-g2")
        terminal.wait_for(r"delete step-10-g1 and step-20-g2 of digits-3f9a \(37 KiB\) at ")
        terminal.wait_for(r"\? \[y/N\] ")
        terminal.type(answer + "\n")
        assert terminal.end() == code
        assert (snapshots / committed.RUN / "step-10-g1").exists() == (code == 1)


def test_a_copy_shows_its_progress_and_ctrl_c_leaves_nothing_behind(me: Person, snapshots: Path) -> None:
    weights = snapshots / committed.RUN / "step-40-g2" / "worker-0" / "variables" / "weights"
    manifest = snapshots / committed.RUN / "step-40-g2" / "manifest.json"
    data, text = weights.read_bytes(), manifest.read_text()
    os.truncate(weights, 16 << 30)  # a sparse file: copying it takes many seconds
    assert text.count(f": {len(data)}") == 1
    manifest.write_text(text.replace(f": {len(data)}", f": {16 << 30}"))
    terminal = me.terminal("snapshots", "get", "digits", "--to", "new/copy")
    terminal.wait_for("step-40-g2: .* MiB of 16.0 GiB")
    assert [path.name for path in (me.folder / "new").iterdir()] != ["copy"]
    terminal.type(CTRL_C)
    assert terminal.end() == 130
    assert not (me.folder / "new").exists()
    weights.unlink()
    weights.write_bytes(data)
    manifest.write_text(text)
    terminal = me.terminal("snapshots", "get", "digits", "--to", "new/copy")
    assert terminal.end() == 0
    [message] = [line for line in terminal.screen if line]
    assert message == f"copied step-40-g2 of digits-3f9a to {me.folder}/new/copy: 2 files, 19 KiB"


def test_a_narrow_terminal_cuts_the_live_line(me: Person) -> None:
    me.job(SHORT + STAYS)
    terminal = person.Terminal(person.words_of("run"), me.folder, person.environment(me.home), columns=32)
    terminal.wait_for(r"digits-[0-9a-z]{6}: generation 1,\.\.\.")
    (me.folder / "go").touch()
    assert terminal.end() == 0
    assert not [line for line in terminal.screen if "generation 1,..." in line]


def test_the_screen_of_these_tests_shows_what_a_terminal_would() -> None:
    assert rendered("a\r\nlive\r\x1b[Jb\r\nx\r\ny\r\x1b[1A\x1b[Jend\r\n") == ["a", "b", "end", ""]
