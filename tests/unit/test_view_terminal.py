"""Lines above a live area; the output of programs cannot control the terminal."""

import errno
import io
import json
import os
import re
import signal
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import app
from paceline.view.text import terminal, yaml_output
from support import recorded


@pytest.mark.parametrize(
    ("text", "colored", "plain"),
    [
        ("plain", "plain", "plain"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m", "red"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m", "red"),
        ("up\x1b[2A\x1b[Kdown", "updown", "updown"),
        ("\x1b[?25l12%\x08\x08\x0813%\x1b[2K", "12%13%", "12%13%"),
        ("\x1b]0;title\x07text", r"\x1b]0;title\x07text", r"\x1b]0;title\x07text"),
        ("\x1b]52;c;ZXZpbA==", r"\x1b]52;c;ZXZpbA==", r"\x1b]52;c;ZXZpbA=="),
        ("\x1b\x1b[K]52;c;x\x07", r"\x1b]52;c;x\x07", r"\x1b]52;c;x\x07"),
        ("\x1b[>4m\x1b[?4m\x1b[1 q", r"\x1b[>4m\x1b[?4m\x1b[1 q", r"\x1b[>4m\x1b[?4m\x1b[1 q"),
        ("\x1bPq#0\x1b\\text", r"\x1bPq#0\x1b\text", r"\x1bPq#0\x1b\text"),
        ("\x1bc\x1b7reset", r"\x1bc\x1b7reset", r"\x1bc\x1b7reset"),
        ("bell\x07 null\x00 delete\x7f", r"bell\x07 null\x00 delete\u007f", r"bell\x07 null\x00 delete\u007f"),
        ("over\rwritten", r"over\x0dwritten", r"over\x0dwritten"),
        ("\x9b31mc1", r"\u009b31mc1", r"\u009b31mc1"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\udc80 \U000e0041", r"\udc80 \U000e0041", r"\udc80 \U000e0041"),
        (
            "tab\tstays ünï ━━ 数\u00a0\U0001f468\u200d\U0001f469",
            *2 * ["tab\tstays ünï ━━ 数\u00a0\U0001f468\u200d\U0001f469"],
        ),
        ("\x1b", r"\x1b", r"\x1b"),
        ("\x1b[", r"\x1b[", r"\x1b["),
    ],
)
def test_only_colors_of_a_program_reach_the_terminal(text: str, colored: str, plain: str) -> None:
    assert terminal.clean(text, colors=True) == colored
    assert terminal.clean(text, colors=False) == plain


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


# What a terminal may receive: colors, line ends, tabs and printable characters.
SAFE = re.compile(r"(?:\x1b\[[0-9;]*m|[\n\t]|[^\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff])*")
HOSTILE = (
    "\x1b]52;c;bHM=\x07", "\x1b]0;title\x1b\\", "\x1b[2J", "\x1b[>4m", "\x1b[?4m", "\x1b[", "\x1b", "\x9b2J",
    "\x9d0;t\x9c", "\r", "\x08", "\x07", "\x85", "\u202e", "\u2066", "\u2028", "\x1b[31m", "\x1b[0m", "m", "\n", "\t",
    "[31m", "\ud83d",
)  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=()), max_size=5))).map(
    "".join
)


def is_safe(text: str) -> bool:
    letters = re.sub(r"\x1b\[[0-9;]*m", "", text)
    others = [letter for letter in letters if not letter.isprintable() and letter not in "\n\t\u200c\u200d"]
    return SAFE.fullmatch(text) is not None and all(unicodedata.category(letter) == "Zs" for letter in others)


@given(texts, st.integers(0, 20))
def test_whatever_is_written_only_visible_text_reaches_a_terminal(text: str, at: int) -> None:
    """Also if it is written in two pieces."""
    tty = Tty()
    stream = terminal.guard(tty)
    assert stream.write(text[:at]) + stream.write(text[at:]) == len(text)
    assert is_safe(tty.getvalue())
    assert terminal.guard(stream) is stream


@given(texts, texts)
def test_whatever_is_shown_only_visible_text_reaches_a_terminal(line: str, live: str) -> None:
    for guarded in (False, True):
        tty = Tty()
        terminal.Screen(terminal.guard(tty) if guarded else tty).show([line], [live])
        assert is_safe(tty.getvalue())


@given(texts)
def test_cells_of_a_table_stay_in_their_row(text: str) -> None:
    shown = terminal.table([["RUN", "REASON"], ["digits", text]])
    assert is_safe(shown) and shown.count("\n") == 1


def test_a_color_ends_with_its_line() -> None:
    tty = Tty()
    stream = terminal.guard(tty)
    print("\x1b[31mred", "\x1b[1mbold", file=stream)
    print("plain", terminal.bold("bold"), file=stream)
    assert tty.getvalue() == "\x1b[31mred \x1b[1mbold\x1b[0m\nplain \x1b[1mbold\x1b[0m\n"


def test_a_file_or_pipe_gets_the_text_as_it_is() -> None:
    file = io.StringIO()
    assert terminal.guard(file) is file


EVIL = "\x1b]52;c;bHM=\x07\x1b]0;title\x1b\\\x1b[2J\x1b[>4m\x9b5A\r\u202e\x1b[31m over"
EVIL_EVENTS = [
    recorded.STARTED, recorded.FORMED,
    recorded.event(3, "task-exited", task="worker-1", code=1, signal=None, expected=False),
    {**recorded.RESTART, "detail": f"ValueError: {EVIL} at train.py:3"},
    recorded.event(4, "warning", text=EVIL), recorded.event(5, EVIL, text=EVIL),
    recorded.event(6, "ending", reason=EVIL, grace_s=1), recorded.event(7, "member-lost", host=EVIL, reason=EVIL),
    recorded.event(8, "task-started", task=EVIL, pid=1, warm=False, host=EVIL),
    recorded.event(9, "run-ended", status="failed", reason=EVIL, cause="program-error"),
]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["events"], ["ls"], ["ls", "-o", "wide"], ["logs"], ["logs", "-f"], ["logs", "--task", EVIL],
     ["status", EVIL], ["run", EVIL], [EVIL], ["status", "--on", EVIL], ["status", f"--{EVIL}"], ["ls", "-o", "json"],
     ["status", "-o", "json"], ["events", "-o", "json"], ["snapshots", "ls", f"/{EVIL}/run-1"], ["validate", EVIL],
     ["plan", "evil.yaml"], ["plan", "evil.yaml", "-o", "json"], ["validate", "bad.yaml"],
     ["delete", "digits", "-y", EVIL]],
    ids=lambda arguments: " ".join(arguments).encode("unicode_escape").decode()[:40],
)  # fmt: skip
def test_no_command_lets_text_of_others_control_the_terminal(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {**recorded.REPORT, "status": "failed", "reason": EVIL, "cause": EVIL}
    report["restarts"] = [{**recorded.REPORT["restarts"][0], "detail": EVIL}]
    log = "".join(f"{recorded.at(3)} g1 {mark} {EVIL}\n" for mark in "|~|~")
    recorded.write(tmp_path, events=EVIL_EVENTS, report=report, logs={"worker-0": log})
    job = {"name": "evil", "framework": "none", "command": ["sh", EVIL], "env": {"TEXT": EVIL}}
    (tmp_path / "evil.yaml").write_text(json.dumps({**job, "roles": {"worker": {"replicas": 1}}}))
    (tmp_path / "bad.yaml").write_text(json.dumps({**job, EVIL: EVIL, "framework": EVIL}))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", out := Tty())
    monkeypatch.setattr(sys, "stderr", err := Tty())
    broken_pipe = signal.getsignal(signal.SIGPIPE)
    try:
        app.main(arguments)
    finally:
        signal.signal(signal.SIGPIPE, broken_pipe)
    shown = (out.getvalue() + err.getvalue()).replace("\r\x1b[J", "")  # of the live area
    assert shown and is_safe(shown)
    assert "52;c;bHM" in shown, "the text itself is shown"


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [("short", 10, "short"), ("exactly 10", 10, "exactly 10"), ("eleven long", 10, "eleven ..."), ("数数数", 5, "数数"),
     ("\x1b[1mbold\x1b[0m", 4, "bold"), ("a\tb", 9, "a b"), ("a\nb", 9, "a\\nb")],
)  # fmt: skip
def test_live_lines_are_cut_to_the_width(text: str, width: int, cut: str) -> None:
    assert terminal.fit(text, width) == cut


def test_the_live_area_is_replaced_and_lines_stay() -> None:
    out = io.StringIO()
    screen = terminal.Screen(out, live=True)
    screen.show(["one"], ["step 1"])
    assert out.getvalue() == "one\nstep 1"
    screen.show([], ["step 1"])
    assert out.getvalue() == "one\nstep 1", "nothing changed: nothing written"
    screen.show(["two"], ["bar", "step 2"])
    assert out.getvalue() == "one\nstep 1\r\x1b[Jtwo\nbar\nstep 2"
    screen.show(["end"])
    assert out.getvalue().endswith("\r\x1b[1A\x1b[Jend\n")


def test_without_a_terminal_there_is_no_live_area_and_no_color() -> None:
    out = io.StringIO()
    screen = terminal.Screen(out)
    screen.show(["one"], ["step 1"])
    assert out.getvalue() == "one\n" and not screen.colors


def test_a_screen_whose_reader_is_gone_reports_it_and_continues() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream:
        screen = terminal.Screen(stream)
        assert not screen.closed()
        os.close(reading)
        assert screen.closed()
        screen.show(["into the void"])
        second = terminal.Screen(stream)
        second.show(["x"])
        assert second.gone
        second.show(["y"])


def test_a_full_disk_below_redirected_output_is_no_closed_terminal() -> None:
    stream = Refusing(errno.ENOSPC)
    screen = terminal.Screen(stream)
    screen.show(["lost"])
    assert not screen.gone and not screen.closed()
    stream.number = 0
    screen.show(["written"])
    assert stream.getvalue() == "written\n"
    for number, gone in ((errno.EIO, False), (errno.EAGAIN, False), (errno.EPIPE, True)):
        screen = terminal.Screen(Refusing(number))
        screen.show(["lost"])
        assert screen.gone == gone, os.strerror(number)


class Refusing(io.StringIO):
    """A stream to which nothing can be written as long as it has an error number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


def test_columns() -> None:
    rows = [["RUN", "STATUS", "REASON"], ["digits-3f9a", "ok", ""], ["a", "failed", "x y"]]
    expected = "RUN          STATUS  REASON\ndigits-3f9a  ok\na            failed  x y"
    assert terminal.table(rows, io.StringIO()) == expected


@pytest.mark.parametrize(
    "data",
    [
        {}, [], {"a": {}}, {"a": []}, {"a": [{}, [], [[1]]]}, {"a": {"b": {"c": [1, {"d": [2, 3], "e": None}]}}},
        [{"a": 1, "b": [1, 2]}, "x"], {"true": "yes", "no": "off", "null": "~", "5": "5", "1.5": "1e3", "": ""},
        {"k: v": "- x", "#": "a # b", "'": '"', "x": " lead", "y": "a\nb\tc", "z": "ünï ☃ \x07", "date": "2026-11-15"},
        {"n": [1, -2, 0.1, 1e30, True, None, float("inf"), float("-inf")]},
        {"s": ["012", "0x1f", "1_000", "=", "<<", "*a", "!b"]},
    ],
    ids=str,
)  # fmt: skip
def test_yaml_is_read_back_as_the_same_data(data: object) -> None:
    from ruamel.yaml import YAML

    assert YAML(typ="safe").load(yaml_output.dump(data)) == data
