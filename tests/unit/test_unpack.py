"""Code is put in place whole or not at all, inside its folder, whatever the archive says."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import resource
import shutil
import stat
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.agent import unpack as unpack_module
from paceline.agent.unpack import PARTIAL, UnpackError, leads_outside, unpack
from support.users import somebody

SOURCE = Path(unpack_module.__file__).parents[2]


def entry(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=0o755)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777)


def raw(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    pieces = []
    for info, content in entries:
        pieces += [info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"), content, b"\0" * (-len(content) % 512)]
    return b"".join([*pieces, b"\0" * 1024])


def packed(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    return gzip.compress(raw(*entries), mtime=0)


def seen(place: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in place.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        name = str(path.relative_to(place))
        found[name] = (
            str(path.readlink()) if path.is_symlink() else (mode, path.read_bytes() if path.is_file() else None)
        )
    return found


SOME = (
    folder("lib"),
    entry("lib/model.py", b"x = 1\n"),
    entry("lib/deep/er/data.bin", b"\0" * 3_000_000),
    link("lib/now.py", "model.py"),
    link("gone", "no/where"),
    entry("run.sh", b"#!/bin/sh\n", mode=0o755),
    folder("out"),
    entry("ä/" + "n" * 150, b"long"),
)
THERE = {
    "lib": (0o755, None),
    "lib/model.py": (0o644, b"x = 1\n"),
    "lib/deep": (0o755, None),
    "lib/deep/er": (0o755, None),
    "lib/deep/er/data.bin": (0o644, b"\0" * 3_000_000),
    "lib/now.py": "model.py",
    "gone": "no/where",
    "run.sh": (0o755, b"#!/bin/sh\n"),
    "out": (0o755, None),
    "ä": (0o755, None),
    "ä/" + "n" * 150: (0o644, b"long"),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    return place


def refused(parts: list[Any], target: Path) -> str:
    """Nothing was written, inside or outside."""
    before = seen(target.parent)
    with pytest.raises(UnpackError) as caught:
        unpack(parts, str(target))
    assert seen(target.parent) == before
    return str(caught.value)


# ---- what arrives


def test_bytes_or_files_in_any_pieces(target: Path, tmp_path: Path) -> None:
    data = packed(*SOME)
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    unpack(pieces, str(target))
    assert seen(target) == THERE
    paths = []
    for number, piece in enumerate(pieces):
        paths.append(tmp_path / f"part-{number}")
        paths[-1].write_bytes(piece)
    unpack(map(str, paths), str(tmp_path / "new" / "folder"))
    assert seen(tmp_path / "new" / "folder") == THERE


def test_a_file_may_be_there_without_the_folders_above_it_being_listed(target: Path) -> None:
    unpack([packed(entry("a/b/c.py", b"c"), link("x/y", "z"))], str(target))
    assert set(seen(target)) == {"a", "a/b", "a/b/c.py", "x", "x/y"}


def test_an_empty_archive_is_an_empty_folder(target: Path) -> None:
    unpack([packed()], str(target))
    assert seen(target) == {}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_permissions_are_those_of_the_archive_whatever_the_umask(target: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        unpack([packed(*SOME)], str(target))
    finally:
        os.umask(before)
    assert seen(target) == THERE


def test_any_numeric_user(open_folder: Path) -> None:
    place = open_folder / "work"
    place.mkdir()
    place.chmod(0o777)
    with somebody() as user:
        unpack([packed(*SOME)], str(place))
        unpack([packed(*SOME)], str(place))
        assert seen(place) == THERE
    assert {path.lstat().st_uid for path in place.rglob("*")} == {user}


# ---- again, in a container that was restarted


def test_again_over_the_same_content(target: Path) -> None:
    for _ in range(3):
        unpack([packed(*SOME)], str(target))
        assert seen(target) == THERE


def test_what_a_program_changed_is_as_it_was_sent_and_what_it_added_stays(target: Path) -> None:
    unpack([packed(*SOME)], str(target))
    (target / "lib" / "model.py").write_text("x = 2")
    (target / "run.sh").chmod(0o600)
    (target / "gone").unlink()
    (target / "gone").write_text("here")
    (target / "out" / "made.bin").write_bytes(b"made")
    (target / PARTIAL).write_bytes(b"left by a kill")
    unpack([packed(*SOME)], str(target))
    assert seen(target) == {**THERE, "out/made.bin": (0o644, b"made")}


def test_a_link_that_a_program_put_in_a_folders_place_is_not_followed(target: Path, tmp_path: Path) -> None:
    unpack([packed(*SOME)], str(target))
    for name in ("lib", "out"):
        shutil.rmtree(target / name)
        (target / name).symlink_to(tmp_path / "outside")
    (target / "run.sh").unlink()
    (target / "run.sh").symlink_to(tmp_path / "outside" / "kept")
    (target / PARTIAL).symlink_to(tmp_path / "outside" / "kept")
    unpack([packed(*SOME)], str(target))
    assert seen(target) == THERE
    assert seen(tmp_path / "outside") == {"kept": (0o644, b"kept")}


def test_a_folder_in_a_files_place_is_an_error_in_words(target: Path) -> None:
    (target / "run.sh").mkdir()
    with pytest.raises(UnpackError) as caught:
        unpack([packed(*SOME)], str(target))
    assert str(caught.value).startswith(f"cannot put the code into {target}: ")
    assert "Is a directory" in str(caught.value)
    assert not (target / PARTIAL).exists()


def test_a_disk_that_is_full_leaves_whole_files_only(target: Path) -> None:
    """The size limit of a process stands for the disk; the file that was there before stays."""
    (target / "big").write_text("before")
    data = packed(entry("a", b"whole"), entry("big", random.Random(1).randbytes(500_000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UnpackError) as caught:
            unpack([data], str(target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot put the code into" in str(caught.value) and "File too large" in str(caught.value)
    assert seen(target) == {"a": (0o644, b"whole"), "big": (0o644, b"before")}


def test_a_folder_that_may_not_be_written(open_folder: Path) -> None:
    place = open_folder / "work"
    open_folder.chmod(0o777)
    with somebody():
        place.mkdir()
        place.chmod(0o500)
        with pytest.raises(UnpackError) as caught:
            unpack([packed(*SOME)], str(place))
        said = f"cannot put the code into {place}: {place}/lib: Permission denied (as user {os.geteuid()})"
        assert str(caught.value) == said


# ---- archives that nobody should unpack


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a/./b", "a//b", ".", "..", "./a", PARTIAL])
def test_names_that_lead_elsewhere(target: Path, name: str) -> None:
    assert refused([packed(entry("fine"), entry(name))], target) == f"{name!r} is no name for something inside a folder"


def test_a_name_that_is_not_utf_8(target: Path) -> None:
    info = tarfile.TarInfo("caf?")
    data = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    data[3] = 0xE9
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    assert refused([gzip.compress(bytes(data) + b"\0" * 1024)], target) == "'caf\\udce9' is not UTF-8"


@pytest.mark.parametrize(
    "links",
    [
        {"out": "/etc"},
        {"out": ".."},
        {"a/out": "../.."},
        {"out": "a/../../outside"},
        {"here": ".", "out": "here/../outside"},
        {"a/b": "../c", "c": "d/..", "d": "e/f", "out": "a/b/../.."},
    ],
)
def test_links_that_lead_out(target: Path, links: dict[str, str]) -> None:
    said = refused([packed(*(link(name, to) for name, to in links.items()))], target)
    name, to = list(links.items())[-1]
    assert said == f"the link {name!r} leads out of the folder, to {to!r}"


def test_links_that_stay_inside() -> None:
    links = {"a/up": "../b", "here": ".", "round": "other", "other": "round", "a/x": "up/../b/c"}
    assert not any(leads_outside(name, links) for name in links)


@pytest.mark.parametrize(
    "entries",
    [
        [link("a", "b"), entry("a/x", b"!")],
        [entry("a/x", b"!"), link("a", "b")],
        [entry("a"), entry("a/x/y")],
        [link("a", "."), folder("a/x")],
        [link("a", "b"), folder("b"), link("a/x", "y")],
    ],
)
def test_nothing_lies_below_a_link_or_a_file(target: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    assert "lies below 'a', which is no folder" in refused([packed(*entries)], target)


@pytest.mark.parametrize(
    "twice", [[entry("a"), entry("a")], [entry("a"), link("a", "/etc")], [folder("a"), entry("a")]]
)
def test_nothing_is_there_twice(target: Path, twice: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    assert refused([packed(*twice)], target) == "'a' is there twice"


@pytest.mark.parametrize(
    "kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"Z"]
)
def test_only_files_folders_and_symbolic_links(target: Path, kind: bytes) -> None:
    said = refused([packed(entry("fine"), entry("odd", type=kind, linkname="fine"))], target)
    assert said == "'odd' is neither a file nor a folder nor a symbolic link"


def test_no_sparse_files(target: Path) -> None:
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s",
        "GNU.sparse.realsize": "9" * 12,
    }
    data = packed(entry("s", b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512, pax_headers=headers))
    assert refused([data], target) == "'s' is neither a file nor a folder nor a symbolic link"


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777])
def test_no_special_permissions(target: Path, mode: int) -> None:
    said = refused([packed(entry("su", mode=mode))], target)
    assert said == f"'su' asks for more than ordinary permissions ({mode:o})"


def test_too_many_files(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "MOST_ENTRIES", 10)
    unpack([packed(*(entry(str(number)) for number in range(10)))], str(target))
    said = refused([packed(*(entry(str(number)) for number in range(11)))], target)
    assert said == "the code has more than 10 files"


def test_a_bomb_is_known_by_what_it_says_of_itself(target: Path) -> None:
    info = tarfile.TarInfo("big")
    info.size = 1 << 40
    assert refused([gzip.compress(info.tobuf())], target) == "the code unpacks to more than 200 MiB"


def test_a_bomb_that_says_nothing_of_itself(target: Path) -> None:
    """A gigabyte of zeros behind the end of the tar, which no entry owns up to."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(raw(*SOME)) + packer.flush(zlib.Z_FULL_FLUSH)
    zeros = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    data = head + zeros * 1024
    assert len(data) < 2 << 20
    assert refused([data], target) == "the code unpacks to more than 200 MiB"


def test_too_much_that_does_not_even_unpack(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "MOST_PACKED", 1 << 20)
    assert refused([b"?" * (1 << 19)] * 3, target) == "the code is over 1 MiB packed"


# ---- damage


def test_damage_is_noticed_before_anything_is_written(target: Path, tmp_path: Path) -> None:
    data = packed(entry("noise", random.Random(1).randbytes(10_000)), *SOME)
    parts = [data[at : at + 4000] for at in range(0, len(data), 4000)]
    damaged = "the code was damaged on its way: "
    missing = damaged + "its end is missing"
    assert refused([], target) == missing
    assert refused([b""], target) == missing
    assert refused(parts[:-1], target) == missing
    assert refused([data[:-1]], target) == missing
    assert refused([parts[0], *parts[2:]], target).startswith(damaged)
    assert refused(parts[::-1], target) == damaged + "it does not unpack"
    assert refused([b"no archive at all"], target) == damaged + "it does not unpack"
    assert refused([*parts, b"more"], target) == damaged + "something follows its end"
    assert refused([data + data], target) == damaged + "something follows its end"
    assert refused([gzip.compress(b"no tar" * 1000)], target).startswith(damaged)
    wrong = bytearray(data)
    wrong[-8] ^= 1  # of the checksum
    assert refused([bytes(wrong)], target) == damaged + "it does not unpack"
    gone = tmp_path / "part-7"
    assert refused([gone], target) == f"cannot read a part of the code, {gone}: No such file or directory"


SMALL = raw(folder("lib"), entry("lib/a.py", b"a" * 600), link("lib/b", "a.py"), entry("ü" * 60, b"u"))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=12), st.booleans())
def test_any_tar_is_put_in_place_or_refused(changes: list[tuple[int, int]], mended: bool) -> None:
    data = bytearray(SMALL)
    for at, value in changes:
        data[at] = value
        head = at - at % 512
        if mended:  # so that tarfile takes it for a good header
            data[head + 148 : head + 156] = b"%06o\0 " % (
                sum(data[head : head + 148]) + 8 * 32 + sum(data[head + 156 : head + 512])
            )
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "a", "b", "work")
        target.mkdir(parents=True)
        with contextlib.suppress(UnpackError):
            unpack([gzip.compress(bytes(data))], str(target))
        assert [path for path in Path(place).rglob("*") if not path.is_relative_to(target)] == list(target.parents)[
            1::-1
        ]
        for path in target.rglob("*"):
            if path.is_symlink():
                assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(target))
            assert not path.lstat().st_mode & 0o7000 or path.is_symlink()


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        for parts in ([data], [gzip.compress(data)], [zlib.compress(data)]):
            with contextlib.suppress(UnpackError):
                unpack(parts, place)
            assert not list(Path(place).iterdir())


def test_a_tar_of_tars_own_making(target: Path, tmp_path: Path) -> None:
    """What other programs write is taken too, as long as it is plain."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("b")
    for form in (tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT):
        memory = io.BytesIO()
        with tarfile.open(fileobj=memory, mode="w:gz", format=form) as tar:
            tar.add(tmp_path / "a", "a")
        unpack([memory.getvalue()], str(target))
        assert seen(target) == {"a": (0o755, None), "a/b.py": (0o644, b"b")}
