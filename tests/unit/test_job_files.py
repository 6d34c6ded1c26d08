"""Files that are not valid job files: missing, not text, not YAML, or malicious."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

import paceline.job.loading  # noqa: F401  before a test switches to a user who cannot read it
from paceline import job
from support.users import somebody

LEAST = (
    "a job needs at least name, framework and command, for example: {name: a, framework: none, command: [python, a.py]}"
)

# (the text, the message after "job.yaml")
TEXTS = {
    "empty": ("", f": the file is empty; {LEAST}"),
    "only a comment": ("# soon\n", f": the file is empty; {LEAST}"),
    "only null": ("---\n...\n", f": the file is empty; {LEAST}"),
    "a list": ("- a\n", f":1: a job file must be a mapping (key: value), got a list; {LEAST}\n    - a"),
    "a word": ("train\n", f':1: a job file must be a mapping (key: value), got "train"; {LEAST}\n    train'),
    "two documents": (
        "name: a\n---\nname: b\n",
        ':2: a second document starts here ("---"): a job file contains one document\n    ---',
    ),
    "a tab": ("name: a\nroles:\n\tworker: {}\n", ":3: not YAML: a tab where YAML allows only spaces; "
              "indent with spaces\n    \\tworker: {}"),
    "an open list": (
        "name: a\ncommand: [python, train.py\nframework: torch\n",
        ':3: not YAML: the list "[" opened on line 2 is not closed with "]", or a "," is missing\n    framework: torch',
    ),
    "an open quote": ('name: "a\nframework: torch\n', ":3: not YAML: the quote opened on line 1 is not closed"),
    "an open mapping": (
        "roles: {worker: {replicas: 2}\nname: a\n",
        ':2: not YAML: the mapping "{" opened on line 1 is not closed with "}", or a "," is missing\n    name: a',
    ),
    "a second colon": (
        "name: a: b\n",
        ':1: not YAML: unexpected ":"; put text that contains ": " in quotes; or add a space after ":" '
        'in the line above, or fix its indentation\n    name: a: b',
    ),
    "wrong indentation": (
        "roles:\n    worker: {}\n  ps: {}\n",
        ":3: not YAML: the indentation does not match the lines above; start all keys of a mapping in the same column\n"
        "      ps: {}",
    ),
    "a line without a colon": (
        "name: a\nframework\ncommand: [a]\n",
        ':3: not YAML: a line has no ":" after its key; write "key: value"\n    command: [a]',
    ),
    "an at sign": ("name: @a\n", ":1: not YAML: text cannot start with @; put it in quotes\n    name: @a"),
    "a control character": ("name: \x01\n", ":1: not YAML: the character U+0001 is not allowed in a text file\n"
                            "    name: \\u0001"),
    "an impossible character": ('name: "\\UFFFFFFFF"\n', ':1: not YAML: "\\UFFFFFFFF" is not a valid character\n'
                                '    name: "\\UFFFFFFFF"'),
    "an unknown alias": (
        "code: *.py\n",
        ':1: code: the alias "*.py" is not defined above; put text that starts with "*" in quotes: "*.py"\n'
        "    code: *.py",
    ),
    "a value that contains itself": (
        "roles: &a\n  worker: *a\n",
        ':2: roles.worker: the alias "*a" refers to a value that contains it\n      worker: *a',
    ),
    "another version": ("%YAML 1.1\n---\nname: a\n", ":2: declares another version of YAML; job files are "
                        "YAML 1.2\n    ---"),
}  # fmt: skip

# (the text, the expected message after "job.yaml")
VALUES = {
    "twice": ("name: a\nname: b\n", ':2: name: the key "name" appears twice: lines 1 and 2\n    name: b'),
    "twice on a line": ("roles: {worker: {}, worker: {}}\n", ':1: roles.worker: the key "worker" appears twice: '
                        "both times on line 1\n    roles: {worker: {}, worker: {}}"),
    "an object": (
        "name: !!python/object:os.system a\n",
        ':1: name: the tag "!!python/object:os.system" is not supported: only plain values are; remove it\n'
        "    name: !!python/object:os.system a",
    ),
    "a set": ("env: !!set {a}\n", ':1: env: the tag "!!set" is not supported: only plain values are; remove it\n'
              "    env: !!set {a}"),
    "bytes": ("name: !!binary aGk=\n", ':1: name: the tag "!!binary" is not supported: only plain values are; '
              "remove it\n    name: !!binary aGk="),
    "a custom tag": ("name: !mine a\n", ':1: name: the tag "!mine" is not supported: only plain values are; '
                        "remove it\n    name: !mine a"),
    "a number as key": ("env: {1: a}\n", ':1: env: a key must be a string, got 1; write "1"\n    env: {1: a}'),
    "a list as key": ("? [a]\n: b\n", ":1: a key must be a string, got a list\n    ? [a]"),
    "no key": ("env: {: a}\n", ":1: env: a key is empty\n    env: {: a}"),
    "a surrogate": ('name: "\\ud800"\n', ":1: name: contains the character \\ud800, which cannot be passed to a "
    "program\n"
                         '    name: "\\ud800"'),
    "a NUL": ('name: "\\0"\n', ":1: name: contains the character \\u0000, which cannot be passed to a program\n"
               '    name: "\\0"'),
    "a merged string": ("env: {<<: a}\n", ':1: env: "<<" must be a mapping or a list of mappings\n    env: {<<: a}'),
}  # fmt: skip


def load_error(text: str, folder: Path) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder)
    return str(caught.value)


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_is_not_a_job(case: str, tmp_path: Path) -> None:
    text, message = TEXTS[case]
    error = load_error(text, tmp_path)
    assert error.startswith(f"job.yaml{message}")


@pytest.mark.parametrize("case", VALUES)
def test_yaml_values_that_a_job_cannot_contain(case: str, tmp_path: Path) -> None:
    text, message = VALUES[case]
    assert f"job.yaml{message}" in load_error(text, tmp_path)


def load_file_error(path: Path) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load(path)
    return str(caught.value).replace(str(path.parent), "FOLDER")


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "job.yml").write_text("name: a\n")
    assert (
        load_file_error(tmp_path / "job.yaml")
        == "FOLDER/job.yaml: the file does not exist; did you mean FOLDER/job.yml?"
    )


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("")
    assert load_file_error(tmp_path / "jobs") == (
        "FOLDER/jobs: is a folder, not a job file; did you mean FOLDER/jobs/job.yaml?"
    )


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    assert load_file_error(tmp_path / "a" / "job.yaml") == "FOLDER/job.yaml: cannot be read: not a directory"


def test_a_name_too_long_for_a_file(tmp_path: Path) -> None:
    assert load_file_error(tmp_path / ("a" * 300)).endswith("cannot be read: file name too long")


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
    assert load_file_error(path) == "FOLDER/job.yaml: the file is too large for a job file: 10.00 MB; the limit is 1 MB"


def test_an_endless_file() -> None:
    error = load_file_error(Path("/dev/zero"))
    assert error == "FOLDER/zero: the file is too large for a job file: more than 1 MB; the limit is 1 MB"


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: a\ncode: caf\xe9\n")
    assert load_file_error(path) == "FOLDER/job.yaml:2: is not UTF-8: byte 17 is 0xe9; save it as UTF-8"
    path.write_bytes("name: a\n".encode("utf-16"))
    assert load_file_error(path) == (
        "FOLDER/job.yaml:1: is not UTF-8: byte 0 is 0xff; it looks like UTF-16: save it as UTF-8"
    )


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines) + "\n"


MEGABYTE = 1_000_000
HARMFUL = {
    "a bomb": (bomb(20), "more than 20000 values after expanding aliases: a job file cannot be that large"),
    "a bomb of merges": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20)),
        "more than 20000 values after expanding aliases: a job file cannot be that large",
    ),
    "deep lists": ("a: " + "[" * 100_000, "values are nested more than 30 levels deep"),
    "deep mappings": ("a: " + "{a: " * 60_000, "values are nested more than 30 levels deep"),
    "deep blocks": ("- " * 100_000, "values are nested more than 30 levels deep"),
    "many values": ("a: [" + "1, " * 80_000 + "1]", "more than 20000 values"),
    "many documents": ("---\n" * 40_000, "a second document starts here"),
    "a long tag": ("a: !" + "x" * 200_000, 'a tag ("!") of more than 2000 characters'),
    "a long text": ("name: " + "x" * 200_000, "a string of 200000 characters; at most 100000 are allowed"),
    "a long line": ("name: " + "x " * 400_000, "characters besides comments; a job file can have at most 262144"),
    "many directives": ("%A b\n" * 40_000, "not YAML: "),
    "long comments": (("# " + "x" * 22 + "\n") * 39_000, "the file is empty"),
    "many comments": ("# x\n" * (MEGABYTE // 4 - 1), "the file has more than 50000 lines"),
    "many empty lines": ("\n" * 49_000 + " " * 800_000, "the file is empty"),
    "many keys": ("".join(f"key-{n}: 1\n" for n in range(9000)), 'unknown key "key-0"'),
    "many wrong volumes": (
        "kubernetes: {volumes: [" + "{mount: 3}, " * 4900 + "a]}",
        "kubernetes.volumes.0.mount: must be a string, got the number 3",
    ),
    "many volumes without a source": (
        "kubernetes: {volumes: [" + "{mount: /a}, " * 4900 + "a]}",
        "kubernetes.volumes.0: a volume needs one of claim, secret, config_map, empty",
    ),
    "many tolerations without a key": (
        "kubernetes: {tolerations: [" + "{}, " * 9_000 + "a]}",
        "kubernetes.tolerations.0: does not name a taint",
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
    "many wrong keys": ("".join(f"{n}: 1\n" for n in range(9000)), "a key must be a string, got 0"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_malicious_file_is_rejected_quickly(case: str, tmp_path: Path) -> None:
    text, message = HARMFUL[case]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    error = load_error(text, tmp_path)
    assert time.process_time() - started < 3.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
    assert message in error
    assert len(error) < 100_000


def test_the_fields_of_an_error_say_what_is_wrong_where_and_what_to_do(tmp_path: Path) -> None:
    text = "name: line\nframework: none\ncomand: [sh]\ncommand: [sh]\n"
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", tmp_path)
    fields = caught.value.to_dict()["error"]
    assert (fields["what"], fields["where"]) == ('comand: unknown key "comand"', "job.yaml:3")
    assert fields["remedy"].startswith('did you mean "command"?; allowed: ')
    with pytest.raises(job.JobError) as caught:
        job.load_text(text + "nam: a\n", "job.yaml", tmp_path)
    fields = caught.value.to_dict()["error"]
    assert (fields["where"], len(fields["problems"])) == ("job.yaml", 2) and "job.yaml:5: nam: unknown" in fields[
        "what"
    ]
