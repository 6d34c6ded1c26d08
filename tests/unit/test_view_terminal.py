"""Lines above a live area; the output of programs cannot control the terminal."""

import io
import os

import pytest

from paceline.view import terminal, yaml_output


@pytest.mark.parametrize(
    ("text", "colored", "plain"),
    [
        ("plain", "plain", "plain"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m", "red"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m", "red"),
        ("up\x1b[2A\x1b[Kdown", "updown", "updown"),
        ("\x1b]0;title\x07text", "text", "text"),
        ("\x1b]0;title\x1b\\text", "text", "text"),
        ("\x1b]52;c;ZXZpbA==", "", ""),
        ("\x1bPq#0\x1b\\text", "text", "text"),
        ("\x1bc\x1b7reset", "reset", "reset"),
        ("bell\x07back\x08\x08space\x00", "bellbackspace", "bellbackspace"),
        ("\x9b31mc1", "31mc1", "31mc1"),
        ("tab\tstays ünï ━━ 数", "tab\tstays ünï ━━ 数", "tab\tstays ünï ━━ 数"),
        ("\x1b", "", ""),
        ("\x1b[", "", ""),
    ],
)
def test_only_colors_of_a_program_reach_the_terminal(text: str, colored: str, plain: str) -> None:
    assert terminal.clean(text, colors=True) == colored
    assert terminal.clean(text, colors=False) == plain


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [("short", 10, "short"), ("exactly 10", 10, "exactly 10"), ("eleven long", 10, "eleven ..."), ("数数数", 5, "数数"),
     ("\x1b[1mbold\x1b[0m", 4, "bold"), ("a\tb", 9, "a b")],
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
