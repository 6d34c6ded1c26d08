"""The code that is sent to a cluster: git's own ignore rules, no secrets, and the same bytes for the same files."""

from __future__ import annotations

import io
import os
import random
import shutil
import socket
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.code_unpacking import MOST_BYTES, unpack
from paceline.backends.kubernetes.payload import code_archive as code_module
from paceline.backends.kubernetes.payload.code_archive import LIMIT, MODIFIED, Code, CodeError, collect
from support.folders import make, sent, write
from support.users import somebody


def collect_error(folder: Path) -> str:
    with pytest.raises(CodeError) as caught:
        collect(folder)
    return str(caught.value)


# ---- what is collected


def test_files_links_and_folders_are_collected_with_their_attributes(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "print(1)\n", "lib/model.py": "x" * 2000, "run.sh": "#!/bin/sh\n"})
    make(tmp_path, "out/")
    (tmp_path / "run.sh").chmod(0o700)
    (tmp_path / "now.py").symlink_to("lib/model.py")
    code = collect(tmp_path)
    assert [(file.path, file.size, file.executable, file.link) for file in code.files] == [
        ("lib/model.py", 2000, False, None),
        ("now.py", 0, False, "lib/model.py"),
        ("run.sh", 10, True, None),
        ("train.py", 9, False, None),
    ]
    assert code.folders == ("lib", "out")
    assert code.size == 2019
    assert code.describe() == "4 files, 2 KiB"
    assert code.notes == ()


@pytest.mark.parametrize(
    ("sizes", "description"), [([], "0 files, 0 B"), ([7], "1 file, 7 B"), ([1 << 20, 1 << 20], "2 files, 2 MiB")]
)
def test_the_code_is_described_in_one_line(tmp_path: Path, sizes: list[int], description: str) -> None:
    for number, size in enumerate(sizes):
        with (tmp_path / f"{number}.py").open("wb") as file:
            file.truncate(size)
    assert collect(tmp_path).describe() == description


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    paths = ["a.py", "b/c.py", "b-c.py", "ä/ö.py", "d" * 200 + "/" + "e" * 200]
    for name, order, mode in (("one", paths, 0o644), ("two", paths[::-1], 0o600)):
        for path in order:
            write(tmp_path / name, {path: path * 50})
            (tmp_path / name / path).chmod(mode)
        (tmp_path / name / "link").symlink_to("a.py")
    os.utime(tmp_path / "two" / "a.py", (1e9, 1e9))
    one, two = collect(tmp_path / "one"), collect(tmp_path / "two")
    assert one.archive() == two.archive()
    write(tmp_path, {"one/a.py": "changed"})
    assert one.archive() == two.archive()  # files are read once
    assert collect(tmp_path / "one").archive() != two.archive()


def test_file_attributes_in_the_archive(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "a", "tool": "t"})
    make(tmp_path, "out/")
    (tmp_path / "tool").chmod(0o751)
    (tmp_path / "out").chmod(0o700)
    (tmp_path / "gone").symlink_to("nowhere")
    with tarfile.open(fileobj=io.BytesIO(collect(tmp_path).archive()), mode="r:gz") as tar:
        infos = tar.getmembers()
    assert [(info.name, info.type, info.mode) for info in infos] == [
        ("a.py", tarfile.REGTYPE, 0o644),
        ("gone", tarfile.SYMTYPE, 0o777),
        ("out", tarfile.DIRTYPE, 0o755),
        ("tool", tarfile.REGTYPE, 0o755),
    ]
    assert {(info.uid, info.gid, info.uname, info.gname, info.mtime) for info in infos} == {(0, 0, "", "", MODIFIED)}


def test_chunks_are_the_archive_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(random.Random(1).randbytes(10_000))
    code = collect(tmp_path)
    chunks = code.chunks(4096)
    assert [len(chunk) for chunk in chunks[:-1]] == [4096] * (len(chunks) - 1) and 0 < len(chunks[-1]) <= 4096
    assert b"".join(chunks) == code.archive()
    assert code.chunks(1 << 20) == [code.archive()]


NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 100
)
# Names that no rule excludes.
PLAIN = NAMES.map(lambda name: f"x{name}x")
CONTENT = st.binary(max_size=2000)
TREES = st.recursive(
    st.tuples(CONTENT, st.booleans()), lambda inner: st.dictionaries(PLAIN, inner, max_size=4), max_leaves=12
)


def grow(folder: Path, tree: Any) -> None:
    if isinstance(tree, dict):
        folder.mkdir()
        for name, inner in tree.items():
            grow(folder / name, inner)
    else:
        content, executable = tree
        folder.write_bytes(content)
        folder.chmod(0o755 if executable else 0o644)


def contents(folder: Path) -> dict[str, object]:
    """Everything that a program can see of a folder."""
    entries: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = os.readlink(path)  # noqa: PTH115 - the exact target
        elif path.is_dir():
            entries[name] = path.stat().st_mode & 0o777
        else:
            entries[name] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return entries


@given(st.dictionaries(PLAIN, TREES, max_size=5), st.data(), st.integers(1, 4000))
def test_the_unpacked_code_equals_the_source(tree: dict[str, object], data: st.DataObject, size: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source, unpacked = Path(temporary, "here"), Path(temporary, "there")
        source.mkdir()
        for name, inner in tree.items():
            grow(source / name, inner)
        targets = sorted(str(path.relative_to(source)) for path in source.rglob("*"))
        for name in data.draw(st.lists(PLAIN.filter(lambda name: name not in tree), max_size=3, unique=True)):
            (source / name).symlink_to(data.draw(st.sampled_from([*targets, "nowhere", "."])))
        for path in source.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        unpack(collect(source).chunks(size), str(unpacked))
        assert contents(unpacked) == contents(source)


# ---- .gitignore


def test_outside_a_repository_gitignore_files_above_the_folder_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*", "job/.gitignore": "*.bin"})
    assert sent(make(tmp_path / "job", "train.py", "a.bin")) == {"train.py", ".gitignore"}


def test_an_ignore_file_may_be_a_link_or_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"rules": "*.bin", "a.bin": "", "sub/b.bin": ""})
    (tmp_path / ".gitignore").symlink_to("rules")
    make(tmp_path, "sub/.gitignore/")
    assert sent(tmp_path) == {"rules", ".gitignore"}


# ---- .pacelineignore


@pytest.mark.parametrize(
    ("git", "own", "expected"),
    [
        ("", "*.txt", {"train.py", "data/big.bin"}),
        ("*.bin", "!*.bin", {"train.py", "data/big.bin", "data/words.txt"}),
        ("!*.bin", "*.bin", {"train.py", "data/words.txt"}),
        ("data/", "", {"train.py"}),
        ("data/", "!data/", {"train.py", "data/big.bin", "data/words.txt"}),
        ("data/", "!data/words.txt", {"train.py", "data/words.txt"}),
        ("data/", "!data/*.txt", {"train.py", "data/words.txt"}),
        ("data/", "!/d*/words.txt", {"train.py", "data/words.txt"}),
        ("data/", "!**/data/*.txt", {"train.py", "data/words.txt"}),
        ("", "data/\n!data/words.txt", {"train.py"}),  # as in git
        ("", "*\n!*/\n!*.py", {"train.py"}),
        ("*", "!train.py", {"train.py"}),
    ],
)
def test_pacelineignore_wins_over_gitignore(tmp_path: Path, git: str, own: str, expected: set[str]) -> None:
    make(tmp_path, "train.py", "data/big.bin", "data/words.txt")
    write(tmp_path, {".gitignore": git, ".pacelineignore": own})
    assert sent(tmp_path) - {".gitignore", ".pacelineignore"} == expected


def test_pacelineignore_wins_wherever_the_two_files_are(tmp_path: Path) -> None:
    write(tmp_path, {".pacelineignore": "!a.bin\nc.bin", "sub/.gitignore": "*.bin\n!c.bin"})
    write(tmp_path, {"other/.pacelineignore": "!c.bin"})  # among .pacelineignore files, the deeper one wins
    make(tmp_path, "sub/a.bin", "sub/b.bin", "sub/c.bin", "other/c.bin")
    assert {path for path in sent(tmp_path) if path.endswith(".bin")} == {"sub/a.bin", "other/c.bin"}


def test_a_folder_included_again_may_have_its_own_rules(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "data/", ".pacelineignore": "!data/some/*", "data/some/.pacelineignore": "*.bin"})
    make(tmp_path, "data/a.txt", "data/some/b.txt", "data/some/c.bin", "data/some/deep/d.txt")
    assert {path for path in sent(tmp_path) if "." not in path[:1]} == {
        "data/some/.pacelineignore", "data/some/b.txt", "data/some/deep/d.txt",
    }  # fmt: skip


# ---- what is not sent by default

SECRETS = (
    ".env", ".env.local", ".env.example", ".envrc", "server.pem", "sub/server.key", "SERVER.KEY", "id_rsa",
    "id_rsa.pub", "id_ed25519", "deploy/id_ed25519.old", "a.p12", "a.pfx", ".netrc", ".aws/credentials", ".ssh/config",
    "sub/.kube/config", ".config/gcloud/x", "sub/.config/gcloud/x", "credentials.json", "my-credentials-2.json",
    "Credentials.json", "service-account.json", "service-account-prod.json", "kubeconfig", "dev.kubeconfig",
    ".git-credentials", ".pypirc", ".docker/config.json",
)  # fmt: skip
JUNK = (
    ".git/config", "sub/.git", "__pycache__/a.py", "lib/__pycache__/a.cpython-311.pyc", "old.pyc",
    "node_modules/x/y.js", ".mypy_cache/x", ".pytest_cache/x", ".ruff_cache/x", ".DS_Store", "sub/.DS_Store",
    ".paceline-partial",
)  # fmt: skip


@pytest.mark.parametrize("path", [*SECRETS, *JUNK])
def test_secrets_and_junk_are_not_sent_by_default(tmp_path: Path, path: str) -> None:
    make(tmp_path, "train.py", path)
    assert sent(tmp_path) == {"train.py"}


@pytest.mark.parametrize("path", [*SECRETS, *JUNK])
def test_a_broad_pattern_does_not_include_secrets_and_junk(tmp_path: Path, path: str) -> None:
    make(tmp_path, "train.py", path)
    write(tmp_path, {".gitignore": f"!{path}", ".pacelineignore": "!*\n!**\n!*/\n!*.*\n!.*\n!sub/*\n!**/*"})
    assert sent(tmp_path) == {"train.py", ".gitignore", ".pacelineignore"}


@pytest.mark.parametrize("path", [*SECRETS, *JUNK])
def test_secrets_and_junk_are_sent_only_if_named_exactly(tmp_path: Path, path: str) -> None:
    make(tmp_path, "train.py", path, f"other/{path}")
    write(tmp_path, {".pacelineignore": f"!/{path}"})
    assert sent(tmp_path) == {"train.py", ".pacelineignore", path}


def test_a_later_line_overrides_an_earlier_one(tmp_path: Path) -> None:
    write(tmp_path, {".pacelineignore": "!ca.pem\n*.pem", "ca.pem": ""})
    assert sent(tmp_path) == {".pacelineignore"}


def test_a_folder_of_keys_is_sent_if_named_except_for_secrets_in_it(tmp_path: Path) -> None:
    make(tmp_path, ".aws/config", ".aws/server.pem")
    write(tmp_path, {".pacelineignore": "!.aws"})
    assert sent(tmp_path) == {".pacelineignore", ".aws/config"}


def test_a_note_lists_the_secrets_that_are_not_sent(tmp_path: Path) -> None:
    make(tmp_path, "certs/ca.pem", ".aws/config", ".env", ".git/config", "old.pyc", "ignored.key")
    write(tmp_path, {".gitignore": "ignored.key\n.env"})
    assert collect(tmp_path).notes == (
        "not sent, may contain secrets: .aws, certs/ca.pem (to send one, add !/.aws to .pacelineignore)",
    )


def test_a_note_lists_only_some_of_many_secrets(tmp_path: Path) -> None:
    make(tmp_path, "train.py", *(f"{number:02}.pem" for number in range(13)))
    (note,) = collect(tmp_path).notes
    assert note.startswith("not sent, may contain secrets: 00.pem, 01.pem") and "09.pem and 3 more (" in note


def test_a_note_says_that_nothing_is_sent(tmp_path: Path) -> None:
    assert collect(tmp_path).notes == ()
    write(tmp_path, {".gitignore": "*"})
    (note,) = collect(tmp_path).notes
    assert note == (
        f"nothing is sent: .gitignore, .pacelineignore or Paceline's built-in rules exclude every file in {tmp_path}"
    )


@pytest.mark.parametrize("marker", ["pyvenv.cfg", "conda-meta/history"])
@pytest.mark.parametrize("name", [".venv", "venv", "env-3.12"])
def test_environments_are_recognized_by_their_contents(tmp_path: Path, name: str, marker: str) -> None:
    make(tmp_path, "train.py", f"{name}/{marker}", f"{name}/lib/a.py")
    assert sent(tmp_path) == {"train.py"}


def test_runs_stored_beside_the_code_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "train.py", "home/runs/digits-0000/events.jsonl")
    assert "home/runs/digits-0000/events.jsonl" in sent(tmp_path)
    for home in ("home", "./home/"):
        monkeypatch.setenv("PACELINE_HOME", f"{tmp_path}/{home}")
        assert "home/runs/digits-0000/events.jsonl" not in sent(tmp_path)


def test_a_package_may_be_called_venv(tmp_path: Path) -> None:
    make(tmp_path, "venv/__init__.py")
    assert sent(tmp_path) == {"venv/__init__.py"}


# ---- folders that are refused


@pytest.mark.parametrize(
    "folder", ["/", "/usr", "/etc", "/tmp", "/var", "/usr/lib", "/proc/self", "/sys/kernel", "/dev"]
)
def test_folders_of_the_system_are_refused(folder: str) -> None:
    message = collect_error(Path(folder))
    assert "this is a system folder, which is not sent" in message or "contains a home folder" in message
    assert message.endswith("; move the program to its own folder and set `code` to that")


def test_the_folder_for_temporary_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "this is a system folder" in collect_error(tmp_path)
    assert sent(make(tmp_path / "job", "a.py")) == {"a.py"}


def test_a_home_folder_is_refused_by_whatever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make(tmp_path / "people" / "ada", "job/train.py", ".ssh/config", "other/.config/gcloud/a/b")
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link").symlink_to(home)
    message = f"{home}: this is a home folder, which is not sent as a whole; move the program to its own folder"
    for path in (home, tmp_path / "link", home / "job" / ".."):
        assert collect_error(path).startswith(message)
    whole = "this folder contains a home folder, which is not sent as a whole"
    assert collect_error(home.parent).startswith(f"{home.parent}: {whole}; move")
    for keys in (home / ".ssh", home / "other" / ".config" / "gcloud" / "a"):
        assert collect_error(keys).startswith(
            f"{keys}: this is a folder for keys or credentials, which is not sent; move"
        )
    assert sent(home / "job") == {"train.py"}


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "train.py")
    (tmp_path / "round").symlink_to("round")
    remedy = "set `code` to the folder with the program"
    assert collect_error(tmp_path / "gone") == f"{tmp_path / 'gone'}: there is no such folder; {remedy}"
    assert collect_error(tmp_path / "train.py") == f"{tmp_path / 'train.py'}: not a folder; {remedy}"
    assert collect_error(tmp_path / "round") == f"{tmp_path / 'round'}: cannot be read: its links form a loop"


# ---- links


def test_links_inside_stay_links(tmp_path: Path) -> None:
    make(tmp_path, "lib/a.py", "sub/deep/")
    links = {"here": ".", "lib2": "lib", "gone": "no/where", "round": "round", "sub/deep/up": "../../lib/a.py"}
    links["odd"] = "./lib//a.py"
    for name, target in links.items():
        os.symlink(target, tmp_path / name)  # noqa: PTH211 - the exact target: a Path would change it
    assert {file.path: file.link for file in collect(tmp_path).files if file.link is not None} == links
    assert sent(tmp_path) == {*links, "lib/a.py"}  # link targets are not sent twice


@pytest.mark.parametrize(
    "links",
    [
        {"out": "/etc/passwd"},
        {"out": ".."},
        {"sub/out": "../../other"},
        {"out": "sub/../../x"},
        {"here": ".", "out": "here/.."},
        {"sub/here": "..", "out": "sub/here/../x"},
    ],
)
def test_a_link_that_leads_out_is_refused_by_name(tmp_path: Path, links: dict[str, str]) -> None:
    folder = make(tmp_path / "job", "sub/")
    for name, target in links.items():
        (folder / name).symlink_to(target)
    name, target = list(links.items())[-1]
    assert collect_error(folder) == (
        f"{folder}: the link {name} points outside the folder, to {target}; replace it with a copy or a relative link"
        " inside the folder, or list it in .pacelineignore"
    )
    write(folder, {".pacelineignore": "out"})
    assert sent(folder) == {".pacelineignore", *links} - {name}


# ---- what cannot be sent


def test_special_files_are_skipped_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "train.py", "ignored/")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "ignored" / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        write(tmp_path, {".gitignore": "ignored"})
        code = collect(tmp_path)
    assert {file.path for file in code.files} == {"train.py", ".gitignore"}
    assert code.notes == ("pipe is not sent: it is a pipe", "sock is not sent: it is a socket")


def test_an_unreadable_file_is_an_error_unless_it_is_ignored(open_folder: Path) -> None:
    make(open_folder, "train.py", "closed.py", "shut/a.py")
    (open_folder / "closed.py").chmod(0)
    (open_folder / "shut").chmod(0)
    remedy = "cannot be read: Permission denied; make it readable, or list it in .pacelineignore"
    with somebody():
        assert collect_error(open_folder) == f"{open_folder}: shut/ {remedy}"
    write(open_folder, {".pacelineignore": "shut"})
    with somebody():
        code = collect(open_folder)
        with pytest.raises(CodeError) as caught:
            code.archive()
        assert str(caught.value) == f"{open_folder}: closed.py {remedy}"
    write(open_folder, {".gitignore": "closed.py"})
    with somebody():
        assert collect(open_folder).archive()
    (open_folder / ".gitignore").chmod(0)
    with somebody():
        assert collect_error(open_folder) == f"{open_folder}: .gitignore {remedy}"


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    bad = os.fsdecode(b"caf\xe9.py")
    make(tmp_path, "café.py", f"sub/{bad}")
    remedy = "is not UTF-8; rename it, or list it in .pacelineignore"
    assert collect_error(tmp_path) == f"{tmp_path}: the name sub/caf\\xe9.py {remedy}"
    (tmp_path / "sub" / bad).unlink()
    (tmp_path / "link").symlink_to(bad)
    assert collect_error(tmp_path) == f"{tmp_path}: the target of the link link {remedy}"
    (tmp_path / ".pacelineignore").write_bytes(b"link")
    assert sent(tmp_path) == {"café.py", ".pacelineignore"}
    make(tmp_path, bad)
    (tmp_path / ".pacelineignore").write_bytes(b"link\ncaf\xe9.*")
    assert sent(tmp_path) == {"café.py", ".pacelineignore"}


def archive_error(code: Code) -> str:
    with pytest.raises(CodeError) as caught:
        code.archive()
    return str(caught.value)


def test_a_file_that_changes_between_being_listed_and_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"log.txt": "one"}) / "log.txt"
    changed = (
        f"{tmp_path}: log.txt changed while it was read; run this again, or list the file in .pacelineignore if"
        " it changes all the time"
    )
    deleted = f"{tmp_path}: log.txt was deleted or replaced while it was read; run this again"
    code = collect(tmp_path)
    path.write_text("two!")
    assert archive_error(code) == changed
    code = collect(tmp_path)
    path.unlink()
    assert archive_error(code) == deleted
    path.symlink_to("/etc/passwd")
    assert archive_error(code) == deleted
    path.unlink()
    os.mkfifo(path)
    assert archive_error(code) == changed


@pytest.mark.parametrize("size", [0, 3 << 20, 5 << 20], ids=["shorter", "same", "longer"])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log.bin"
    path.write_bytes(b"." * (3 << 20))
    pieces = collect(tmp_path)._tar()
    for _ in range(2):  # its header, and part of its content
        next(pieces)
    with path.open("r+b") as file:
        file.truncate(size)
        file.write(b"!")
    os.utime(path, ns=(1, 1))
    with pytest.raises(CodeError, match=r"log\.bin changed while it was read"):
        for _ in pieces:
            pass


def test_a_folder_that_vanishes_while_it_is_listed(tmp_path: Path) -> None:
    make(tmp_path, "a/x.py", "b.py")
    paths = code_module._walk(tmp_path)
    next(paths)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CodeError, match=r": a/ was deleted or replaced while it was read; run this again$"):
        list(paths)


# ---- limits


def test_too_much_code_is_refused_with_the_largest_files_and_two_remedies(tmp_path: Path) -> None:
    noise = random.Random(1)
    for number in range(12):
        make(tmp_path, "data/")
        (tmp_path / "data" / f"{number:02}.bin").write_bytes(noise.randbytes((number + 1) << 17))
    (tmp_path / "train.py").write_text("pass")
    assert archive_error(collect(tmp_path)).splitlines() == [
        f"the code in {tmp_path} is too large to send: 13 files, 10 MiB, more than 8 MiB when compressed.",
        "The largest files:",
        "      2 MiB  data/11.bin",
        "      1 MiB  data/10.bin",
        "      1 MiB  data/09.bin",
        "      1 MiB  data/08.bin",
        "      1 MiB  data/07.bin",
        "    896 KiB  data/06.bin",
        "    768 KiB  data/05.bin",
        "    640 KiB  data/04.bin",
        "    512 KiB  data/03.bin",
        "    384 KiB  data/02.bin",
        f"Either list the files that the run does not need in {tmp_path}/.pacelineignore (same syntax as .gitignore),",
        "or put the code into the image and set `code: image` in the job file.",
    ]
    write(tmp_path, {".pacelineignore": "data/*.bin"})
    assert collect(tmp_path).archive()


def test_the_limit_applies_to_the_compressed_size(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"0,0,0,0\n" * (2 * LIMIT // 8))
    assert len(collect(tmp_path).archive()) < LIMIT // 100


def test_huge_amounts_are_refused_before_anything_is_read(open_folder: Path) -> None:
    with (open_folder / "model.bin").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    (open_folder / "model.bin").chmod(0)
    make(open_folder, "train.py")
    with somebody():
        message = collect_error(open_folder)
    assert message.startswith(
        f"the code in {open_folder} is too large to send: 2 files, 200 MiB, more than 200 MiB before compression."
        "\nThe largest files:\n    200 MiB  model.bin\n"
    )
    write(open_folder, {".pacelineignore": "*.bin"})
    assert sent(open_folder) == {"train.py", ".pacelineignore"}


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "MOST_ENTRIES", 10)
    make(tmp_path, *(f"{number}.py" for number in range(11)))
    assert "and more that were not counted; the limit is 10 files and folders" in collect_error(tmp_path)
    (tmp_path / "0.py").unlink()
    assert len(sent(tmp_path)) == 10


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    make(tmp_path, "\x1b[2J.pem")
    (tmp_path / "\x1b[31m").symlink_to("/x")
    assert "\x1b" not in collect_error(tmp_path) and "\\u001b[31m" in collect_error(tmp_path)
    (tmp_path / "\x1b[31m").unlink()
    assert "\x1b" not in "".join(collect(tmp_path).notes)
