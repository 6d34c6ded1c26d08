"""What a run has stored in a bucket is data: whoever can write there cannot choose names of files of its readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.backends import archive_import
from paceline.storage.run_archive import RunArchive
from paceline.storage.snapshots.manifest import Damaged
from paceline.storage.stores.folder import FolderStore

LINE = b"2026-11-15T10:00:01.000Z g1 | a\n"


def imported(tmp_path: Path, files: dict[str, bytes]) -> Path:
    piece = tmp_path / "store" / "run" / "logs" / "worker-host-0" / "life" / "00000001"
    piece.parent.mkdir(parents=True)
    head = {"version": 1, "files": {name: len(data) for name, data in files.items()}}
    piece.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(files.values()))
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = RunArchive(FolderStore(str(tmp_path / "store")), "run")
    for _ in range(2):  # the second time, the lines are merged with those that are there
        archive_import.import_hosts(archive, folder, ["worker-host-0"])
    return folder


@pytest.mark.parametrize(
    "name",
    ["run.json", "job.yaml", "../plan.json", "logs/../run.json", "logs/a/b.log", "logs/\ud800.log", "logs/...log",
     "logs/\x1b]0;a.log", "logs/a\n.log", f"logs/{'x' * 255}.log", "/tmp/a.log"],
)  # fmt: skip
def test_only_files_of_a_run_are_imported(tmp_path: Path, name: str) -> None:
    with pytest.raises(Damaged, match="its contents do not match its header"):
        imported(tmp_path, {name: LINE})
    assert list((tmp_path / "folder").iterdir()) == []


def test_any_output_can_be_merged(tmp_path: Path) -> None:
    log = LINE + LINE.replace(b"g1", b"g" + b"9" * 5000) + b"\xff\0\x1b]52;c;\n"
    assert (imported(tmp_path, {"logs/worker-0.log": log}) / "logs" / "worker-0.log").read_bytes() == log
