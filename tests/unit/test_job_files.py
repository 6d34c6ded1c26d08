"""Files that are no job file: not there, not text, not YAML, or made to do harm."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

import paceline.job.loading  # noqa: F401  before one of these tests is a user who cannot read it
from paceline import job
from support.users import somebody

LEAST = "the least is name, framework and command, such as: {name: a, framework: none, command: [python, a.py]}"

# (the text, the message after "job.yaml")
TEXTS = {
    "empty": ("", f": the file is empty; {LEAST}"),
    "only a comment": ("# soon\n", f": the file is empty; {LEAST}"),
    "only null": ("---\n...\n", f": the file is empty; {LEAST}"),
    "a list": ("- a\n", f":1: a job is a mapping (key: value), this is a list; {LEAST}\n    - a"),
    "a word": ("train\n", f':1: a job is a mapping (key: value), this is "train"; {LEAST}\n    train'),
    "two documents": (
        "name: a\n---\nname: b\n",
        ':2: a second document starts here ("---"): a file holds one job\n    ---',
    ),
    "a tab": ("name: a\nroles:\n\tworker: {}\n", ":3: not YAML: a tab stands where YAML takes only spaces; "
              "indent with spaces\n    \\tworker: {}"),
    "an open list": (
        "name: a\ncommand: [python, train.py\nframework: torch\n",
        ':3: not YAML: the list "[" opened on line 2 is not closed by "]", or lacks a ","\n    framework: torch',
    ),
    "an open quote": ('name: "a\nframework: torch\n', ":3: not YAML: the quote opened on line 1 is not closed"),
    "an open mapping": (
        "roles: {worker: {replicas: 2}\nname: a\n",
        ':2: not YAML: the mapping "{" opened on line 1 is not closed by "}", or lacks a ","\n    name: a',
    ),
    "a second colon": (
        "name: a: b\n",
        ':1: not YAML: a ":" that is not expected here; text with ": " needs quotes; or the line above lacks a space '
        'after its ":", or is indented otherwise\n    name: a: b',
    ),
    "wrong indentation": (
        "roles:\n    worker: {}\n  ps: {}\n",
        ":3: not YAML: the indentation does not fit the lines above; keys of one mapping start in the same column\n"
        "      ps: {}",
    ),
    "a line without a colon": (
        "name: a\nframework\ncommand: [a]\n",
        ':3: not YAML: a line without ":" after its key; write "key: value"\n    command: [a]',
    ),
    "an at sign": ("name: @a\n", ":1: not YAML: text cannot start with @; put it in quotes\n    name: @a"),
    "a control character": ("name: \x01\n", ":1: not YAML: the character U+0001 may not stand in a text file\n"
                            "    name: \\u0001"),
    "an impossible character": ('name: "\\UFFFFFFFF"\n', ':1: not YAML: "\\UFFFFFFFF" stands for no character\n'
                                '    name: "\\UFFFFFFFF"'),
    "an unknown alias": (
        "code: *.py\n",
        ':1: code: "*.py" stands for nothing: no "&" names it above; text that starts with "*" needs quotes: "*.py"\n'
        "    code: *.py",
    ),
    "a value that holds itself": (
        "roles: &a\n  worker: *a\n",
        ':2: roles.worker: "*a" stands for a value that holds itself\n      worker: *a',
    ),
    "another version": ("%YAML 1.1\n---\nname: a\n", ":2: says it is of another version of YAML; job files are "
                        "YAML 1.2\n    ---"),
}  # fmt: skip

# (a line, the messages for its values)
VALUES = {
    "twice": ("name: a\nname: b\n", ':2: name: the key "name" appears twice: lines 1 and 2\n    name: b'),
    "twice on a line": ("roles: {worker: {}, worker: {}}\n", ':1: roles.worker: the key "worker" appears twice: '
                        "both times on line 1\n    roles: {worker: {}, worker: {}}"),
    "an object": (
        "name: !!python/object:os.system a\n",
        ':1: name: the tag "!!python/object:os.system" is not taken: only plain values are; remove it\n'
        "    name: !!python/object:os.system a",
    ),
    "a set": ("env: !!set {a}\n", ':1: env: the tag "!!set" is not taken: only plain values are; remove it\n'
              "    env: !!set {a}"),
    "bytes": ("name: !!binary aGk=\n", ':1: name: the tag "!!binary" is not taken: only plain values are; '
              "remove it\n    name: !!binary aGk="),
    "a tag of theirs": ("name: !mine a\n", ':1: name: the tag "!mine" is not taken: only plain values are; remove it\n'
                        "    name: !mine a"),
    "a number as key": ("env: {1: a}\n", ':1: env: a key must be text, got 1; write "1"\n    env: {1: a}'),
    "a list as key": ("? [a]\n: b\n", ":1: a key must be text, got a list\n    ? [a]"),
    "no key": ("env: {: a}\n", ":1: env: a key is empty\n    env: {: a}"),
    "half a character": ('name: "\\ud800"\n', ":1: name: holds the character \\ud800, which no program can be given\n"
                         '    name: "\\ud800"'),
    "a zero": ('name: "\\0"\n', ":1: name: holds the character \\u0000, which no program can be given\n"
               '    name: "\\0"'),
    "a merged word": ("env: {<<: a}\n", ':1: env: "<<" takes a mapping, or a list of mappings\n    env: {<<: a}'),
}  # fmt: skip


def mistakes(text: str, folder: Path) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder)
    return str(caught.value)


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_is_no_job(case: str, tmp_path: Path) -> None:
    text, message = TEXTS[case]
    shown = mistakes(text, tmp_path)
    assert shown.startswith(f"job.yaml{message}")


@pytest.mark.parametrize("case", VALUES)
def test_values_that_yaml_has_and_a_job_has_not(case: str, tmp_path: Path) -> None:
    text, message = VALUES[case]
    assert f"job.yaml{message}" in mistakes(text, tmp_path)


def read(path: Path) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load(path)
    return str(caught.value).replace(str(path.parent), "FOLDER")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "job.yml").write_text("name: a\n")
    assert read(tmp_path / "job.yaml") == "FOLDER/job.yaml: there is no such file; did you mean FOLDER/job.yml?"


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("")
    assert read(tmp_path / "jobs") == ("FOLDER/jobs: is a folder, not a job file; did you mean FOLDER/jobs/job.yaml?")


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    assert read(tmp_path / "a" / "job.yaml") == "FOLDER/job.yaml: cannot be read: not a directory"


def test_a_name_too_long_for_a_file(tmp_path: Path) -> None:
    assert read(tmp_path / ("a" * 300)).endswith("cannot be read: file name too long")


def test_an_unreadable_file(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_folder / "job.yaml"
    path.write_text("name: a\n")
    path.chmod(0)
    monkeypatch.chdir(open_folder)
    with somebody(), pytest.raises(job.JobError) as caught:
        job.load(Path("job.yaml"))
    assert str(caught.value) == "job.yaml: cannot be read: permission denied"


def test_a_file_of_ten_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"a" * 10_000_000)
    assert read(path) == "FOLDER/job.yaml: the file is too large for a job file: 10.00 MB; at most 1 MB is read"


def test_a_file_without_end() -> None:
    shown = read(Path("/dev/zero"))
    assert shown == "FOLDER/zero: the file is too large for a job file: more than 1 MB; at most 1 MB is read"


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: a\ncode: caf\xe9\n")
    assert read(path) == "FOLDER/job.yaml:2: is not UTF-8: byte 17 is 0xe9; save it as UTF-8"
    path.write_bytes("name: a\n".encode("utf-16"))
    assert read(path) == ("FOLDER/job.yaml:1: is not UTF-8: byte 0 is 0xff; it looks like UTF-16: save it as UTF-8")


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines) + "\n"


MEGABYTE = 1_000_000
HARMFUL = {
    "a bomb": (bomb(20), "more than 20000 values, counting what each alias stands for: no job file is that large"),
    "a bomb of merges": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20)),
        "more than 20000 values, counting what each alias stands for: no job file is that large",
    ),
    "deep lists": ("a: " + "[" * 100_000, "values within values, more than 30 deep"),
    "deep mappings": ("a: " + "{a: " * 60_000, "values within values, more than 30 deep"),
    "deep blocks": ("- " * 100_000, "values within values, more than 30 deep"),
    "many values": ("a: [" + "1, " * 80_000 + "1]", "more than 20000 values"),
    "many documents": ("---\n" * 40_000, "a second document starts here"),
    "a long tag": ("a: !" + "x" * 200_000, 'a word of more than 2000 characters that starts with "!"'),
    "a long text": ("name: " + "x" * 200_000, "a text of 200000 characters; at most 100000 are taken"),
    "a long line": ("name: " + "x " * 400_000, "characters besides comments; a job file holds at most 262144"),
    "many directives": ("%A b\n" * 40_000, "not YAML: "),
    "long comments": (("# " + "x" * 22 + "\n") * 39_000, "the file is empty"),
    "many comments": ("# x\n" * (MEGABYTE // 4 - 1), "the file has more than 50000 lines"),
    "many empty lines": ("\n" * 49_000 + " " * 800_000, "the file is empty"),
    "many keys": ("".join(f"key-{n}: 1\n" for n in range(9000)), 'unknown key "key-0"'),
    "many wrong volumes": (
        "kubernetes: {volumes: [" + "{mount: 3}, " * 4900 + "a]}",
        "kubernetes.volumes.0.mount: must be text, got the number 3",
    ),
    "many volumes of nothing": (
        "kubernetes: {volumes: [" + "{mount: /a}, " * 4900 + "a]}",
        "kubernetes.volumes.0: a volume needs one of claim, secret, config_map, empty",
    ),
    "many tolerations of nothing": (
        "kubernetes: {tolerations: [" + "{}, " * 9_000 + "a]}",
        "kubernetes.tolerations.0: names no taint",
    ),
    "many labels": (
        "kubernetes: {labels: {" + "".join(f"a{n}-: {'a-' * 9}, " for n in range(6000)) + "}}",
        'kubernetes.labels.a0-: "a0-" is not a valid key; did you mean "a0"?',
    ),
    "long labels": (
        "kubernetes: {labels: {" + "".join(f"{'a' * 250}.{n}-/a: b, " for n in range(950)) + "}}",
        "is not a valid key",
    ),
    "a deep patch": (
        "kubernetes: {pod: " + "{a: [" * 13 + "1, " * 19_000 + ".inf" + "]}" * 13 + "}",
        "must be a finite number, got inf",
    ),
    "many wrong keys": ("".join(f"{n}: 1\n" for n in range(9000)), "a key must be text, got 0"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_harmful_file_is_refused_in_time(case: str, tmp_path: Path) -> None:
    text, message = HARMFUL[case]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    shown = mistakes(text, tmp_path)
    assert time.process_time() - started < 3.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
    assert message in shown
    assert len(shown) < 100_000
