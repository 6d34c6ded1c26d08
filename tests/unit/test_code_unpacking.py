"""Code is unpacked completely or not at all, inside its folder, whatever the archive contains."""

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

from paceline.agent import code_unpacking as unpack_module
from paceline.agent.code_unpacking import PARTIAL, UnpackError, leads_outside, unpack
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


def contents(root: Path) -> dict[str, object]:
    entries: dict[str, object] = {}
    for path in root.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        name = str(path.relative_to(root))
        entries[name] = (
            str(path.readlink()) if path.is_symlink() else (mode, path.read_bytes() if path.is_file() else None)
        )
    return entries


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
UNPACKED = {
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
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    return work


def unpack_error(parts: list[Any], target: Path) -> str:
    """The error of `unpack`; checks that nothing was written, inside or outside."""
    before = contents(target.parent)
    with pytest.raises(UnpackError) as caught:
        unpack(parts, str(target))
    assert contents(target.parent) == before
    return str(caught.value)


# ---- what is unpacked


def test_an_archive_may_be_bytes_or_files_in_any_number_of_pieces(target: Path, tmp_path: Path) -> None:
    data = packed(*SOME)
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    unpack(pieces, str(target))
    assert contents(target) == UNPACKED
    paths = []
    for number, piece in enumerate(pieces):
        paths.append(tmp_path / f"part-{number}")
        paths[-1].write_bytes(piece)
    unpack(map(str, paths), str(tmp_path / "new" / "folder"))
    assert contents(tmp_path / "new" / "folder") == UNPACKED


def test_the_folders_above_a_file_need_not_be_listed(target: Path) -> None:
    unpack([packed(entry("a/b/c.py", b"c"), link("x/y", "z"))], str(target))
    assert set(contents(target)) == {"a", "a/b", "a/b/c.py", "x", "x/y"}


def test_an_empty_archive_is_an_empty_folder(target: Path) -> None:
    unpack([packed()], str(target))
    assert contents(target) == {}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_permissions_are_those_of_the_archive_whatever_the_umask(target: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        unpack([packed(*SOME)], str(target))
    finally:
        os.umask(before)
    assert contents(target) == UNPACKED


def test_any_numeric_user_can_unpack(open_folder: Path) -> None:
    work = open_folder / "work"
    work.mkdir()
    work.chmod(0o777)
    with somebody() as user:
        unpack([packed(*SOME)], str(work))
        unpack([packed(*SOME)], str(work))
        assert contents(work) == UNPACKED
    assert {path.lstat().st_uid for path in work.rglob("*")} == {user}


# ---- unpacking again, in a restarted container


def test_unpacking_again_gives_the_same_contents(target: Path) -> None:
    for _ in range(3):
        unpack([packed(*SOME)], str(target))
        assert contents(target) == UNPACKED


def test_changed_files_are_restored_and_added_files_stay(target: Path) -> None:
    unpack([packed(*SOME)], str(target))
    (target / "lib" / "model.py").write_text("x = 2")
    (target / "run.sh").chmod(0o600)
    (target / "gone").unlink()
    (target / "gone").write_text("here")
    (target / "out" / "made.bin").write_bytes(b"made")
    (target / PARTIAL).write_bytes(b"left by a kill")
    unpack([packed(*SOME)], str(target))
    assert contents(target) == {**UNPACKED, "out/made.bin": (0o644, b"made")}


def test_a_link_that_replaced_a_folder_is_not_followed(target: Path, tmp_path: Path) -> None:
    unpack([packed(*SOME)], str(target))
    for name in ("lib", "out"):
        shutil.rmtree(target / name)
        (target / name).symlink_to(tmp_path / "outside")
    (target / "run.sh").unlink()
    (target / "run.sh").symlink_to(tmp_path / "outside" / "kept")
    (target / PARTIAL).symlink_to(tmp_path / "outside" / "kept")
    unpack([packed(*SOME)], str(target))
    assert contents(target) == UNPACKED
    assert contents(tmp_path / "outside") == {"kept": (0o644, b"kept")}


def test_a_folder_with_the_name_of_a_file_is_reported(target: Path) -> None:
    (target / "run.sh").mkdir()
    with pytest.raises(UnpackError) as caught:
        unpack([packed(*SOME)], str(target))
    assert str(caught.value).startswith(f"cannot unpack the code into {target}: ")
    assert "Is a directory" in str(caught.value)
    assert not (target / PARTIAL).exists()


def test_a_full_disk_leaves_only_complete_files(target: Path) -> None:
    """The file size limit of a process stands for the disk; the file that existed before stays."""
    (target / "big").write_text("before")
    data = packed(entry("a", b"whole"), entry("big", random.Random(1).randbytes(500_000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UnpackError) as caught:
            unpack([data], str(target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot unpack the code into" in str(caught.value) and "File too large" in str(caught.value)
    assert contents(target) == {"a": (0o644, b"whole"), "big": (0o644, b"before")}


def test_a_folder_without_write_permission_is_reported(open_folder: Path) -> None:
    work = open_folder / "work"
    open_folder.chmod(0o777)
    with somebody():
        work.mkdir()
        work.chmod(0o500)
        with pytest.raises(UnpackError) as caught:
            unpack([packed(*SOME)], str(work))
        message = f"cannot unpack the code into {work}: {work}/lib: Permission denied (as user {os.geteuid()})"
        assert str(caught.value) == message


# ---- unsafe archives


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a/./b", "a//b", ".", "..", "./a", PARTIAL])
def test_names_that_lead_outside_are_refused(target: Path, name: str) -> None:
    assert (
        unpack_error([packed(entry("fine"), entry(name))], target) == f"{name!r} is not a valid path inside the folder"
    )


def test_a_name_that_is_not_utf_8_is_refused(target: Path) -> None:
    info = tarfile.TarInfo("caf?")
    data = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    data[3] = 0xE9
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    assert unpack_error([gzip.compress(bytes(data) + b"\0" * 1024)], target) == "'caf\\udce9' is not UTF-8"


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
def test_links_that_lead_outside_are_refused(target: Path, links: dict[str, str]) -> None:
    message = unpack_error([packed(*(link(name, to) for name, to in links.items()))], target)
    name, to = list(links.items())[-1]
    assert message == f"the symbolic link {name!r} points outside the folder, to {to!r}"


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
def test_an_entry_below_a_link_or_a_file_is_refused(target: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    assert "is inside 'a', which is not a folder" in unpack_error([packed(*entries)], target)


@pytest.mark.parametrize(
    "entries", [[entry("a"), entry("a")], [entry("a"), link("a", "/etc")], [folder("a"), entry("a")]]
)
def test_a_duplicate_entry_is_refused(target: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    assert unpack_error([packed(*entries)], target) == "'a' occurs twice in the code archive"


@pytest.mark.parametrize(
    "kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"Z"]
)
def test_only_files_folders_and_symbolic_links_are_accepted(target: Path, kind: bytes) -> None:
    message = unpack_error([packed(entry("fine"), entry("odd", type=kind, linkname="fine"))], target)
    assert message == "'odd' is not a file, a folder or a symbolic link"


def test_sparse_files_are_refused(target: Path) -> None:
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s",
        "GNU.sparse.realsize": "9" * 12,
    }
    data = packed(entry("s", b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512, pax_headers=headers))
    assert unpack_error([data], target) == "'s' is not a file, a folder or a symbolic link"


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777])
def test_special_permissions_are_refused(target: Path, mode: int) -> None:
    message = unpack_error([packed(entry("su", mode=mode))], target)
    assert message == f"'su' has special permission bits ({mode:o})"


def test_too_many_files_are_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "MOST_ENTRIES", 10)
    unpack([packed(*(entry(str(number)) for number in range(10)))], str(target))
    message = unpack_error([packed(*(entry(str(number)) for number in range(11)))], target)
    assert message == "the code has more than 10 files"


def test_a_bomb_is_refused_by_its_declared_size(target: Path) -> None:
    info = tarfile.TarInfo("big")
    info.size = 1 << 40
    assert unpack_error([gzip.compress(info.tobuf())], target) == "the code unpacks to more than 200 MiB"


def test_a_bomb_without_a_declared_size_is_refused(target: Path) -> None:
    """A gigabyte of zeros after the end of the tar, which belongs to no entry."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(raw(*SOME)) + packer.flush(zlib.Z_FULL_FLUSH)
    zeros = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    data = head + zeros * 1024
    assert len(data) < 2 << 20
    assert unpack_error([data], target) == "the code unpacks to more than 200 MiB"


def test_an_oversized_archive_is_refused_even_if_it_cannot_be_decompressed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack_module, "MOST_PACKED", 1 << 20)
    assert unpack_error([b"?" * (1 << 19)] * 3, target) == "the code archive is larger than 1 MiB"


# ---- damage


def test_damage_is_noticed_before_anything_is_written(target: Path, tmp_path: Path) -> None:
    data = packed(entry("noise", random.Random(1).randbytes(10_000)), *SOME)
    parts = [data[at : at + 4000] for at in range(0, len(data), 4000)]
    damaged = "the code archive is damaged: "
    truncated = damaged + "it is truncated"
    assert unpack_error([], target) == truncated
    assert unpack_error([b""], target) == truncated
    assert unpack_error(parts[:-1], target) == truncated
    assert unpack_error([data[:-1]], target) == truncated
    assert unpack_error([parts[0], *parts[2:]], target).startswith(damaged)
    assert unpack_error(parts[::-1], target) == damaged + "it cannot be decompressed"
    assert unpack_error([b"no archive at all"], target) == damaged + "it cannot be decompressed"
    assert unpack_error([*parts, b"more"], target) == damaged + "there is data after its end"
    assert unpack_error([data + data], target) == damaged + "there is data after its end"
    assert unpack_error([gzip.compress(b"no tar" * 1000)], target).startswith(damaged)
    wrong = bytearray(data)
    wrong[-8] ^= 1  # of the checksum
    assert unpack_error([bytes(wrong)], target) == damaged + "it cannot be decompressed"
    missing_part = tmp_path / "part-7"
    assert (
        unpack_error([missing_part], target)
        == f"{missing_part}: cannot read part of the code: No such file or directory"
    )


SMALL = raw(folder("lib"), entry("lib/a.py", b"a" * 600), link("lib/b", "a.py"), entry("ü" * 60, b"u"))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=12), st.booleans())
def test_any_tar_is_unpacked_inside_its_folder_or_refused(changes: list[tuple[int, int]], fix_checksums: bool) -> None:
    data = bytearray(SMALL)
    for at, value in changes:
        data[at] = value
        head = at - at % 512
        if fix_checksums:  # so that tarfile accepts the header
            data[head + 148 : head + 156] = b"%06o\0 " % (
                sum(data[head : head + 148]) + 8 * 32 + sum(data[head + 156 : head + 512])
            )
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary, "a", "b", "work")
        target.mkdir(parents=True)
        with contextlib.suppress(UnpackError):
            unpack([gzip.compress(bytes(data))], str(target))
        assert [path for path in Path(temporary).rglob("*") if not path.is_relative_to(target)] == list(target.parents)[
            1::-1
        ]
        for path in target.rglob("*"):
            if path.is_symlink():
                assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(target))
            assert not path.lstat().st_mode & 0o7000 or path.is_symlink()


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for parts in ([data], [gzip.compress(data)], [zlib.compress(data)]):
            with contextlib.suppress(UnpackError):
                unpack(parts, temporary)
            assert not list(Path(temporary).iterdir())


def test_archives_in_all_tar_formats_are_accepted(target: Path, tmp_path: Path) -> None:
    """Archives from other programs are accepted, too, if they are plain."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("b")
    for form in (tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT):
        memory = io.BytesIO()
        with tarfile.open(fileobj=memory, mode="w:gz", format=form) as tar:
            tar.add(tmp_path / "a", "a")
        unpack([memory.getvalue()], str(target))
        assert contents(target) == {"a": (0o755, None), "a/b.py": (0o644, b"b")}
