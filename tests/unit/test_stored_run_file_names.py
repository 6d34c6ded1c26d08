"""What a run has stored in a bucket is data: whoever can write there cannot choose names of files of its readers."""

from __future__ import annotations

import json
import shutil
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline import plan as plans
from paceline.agent.limited_log import LimitedLog
from paceline.backends import archive_import
from paceline.storage.snapshots.manifest import Damaged
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import run_folders
from support.worlds import make_plan

LINE = b"2026-11-15T10:00:01.000Z g1 | a\n"
PLAN = plans.to_json(make_plan(50, per_host=50))


def imported(tmp_path: Path, files: dict[str, bytes], host: str = "worker-host-0", plan: str = PLAN) -> Path:
    piece = tmp_path / "store" / "run" / "logs" / host / "life" / "00000001"
    piece.parent.mkdir(parents=True)
    head = {"version": 1, "files": {name: len(data) for name, data in files.items()}}
    piece.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(files.values()))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "plan.json").write_text(plan)
    archive = StoredRunFiles(FolderStore(str(tmp_path / "store")), "run")
    for _ in range(2):  # the second time, the lines are merged with those that are there
        archive_import.import_hosts(archive, folder, [host])
    return folder


@pytest.mark.parametrize(
    "name",
    ["run.json", "job.yaml", "../plan.json", "logs/../run.json", "logs/a/b.log", "logs/\ud800.log", "logs/...log",
     "logs/\x1b]0;a.log", "logs/a\n.log", f"logs/{'x' * 255}.log", "/tmp/a.log"],
)  # fmt: skip
def test_only_files_of_a_run_are_imported(tmp_path: Path, name: str) -> None:
    with pytest.raises(Damaged, match="its contents do not match its header"):
        imported(tmp_path, {name: LINE})
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["plan.json"]


def test_of_a_member_only_the_output_of_its_own_tasks_is_imported(tmp_path: Path) -> None:
    """A program may write to the store in the name of its host: events and the report come from the captain only."""
    event = b'{"at": "2026-11-15T10:00:05.000Z", "event": "run-ended", "generation": 9, "status": "succeeded"}\n'
    forged = {"events.jsonl": event, "report.json": b'{"status": "succeeded"}', "plan.json": b"{}"}
    others = {"logs/worker-2.log": LINE, "logs/ingest-0.log": LINE, "logs/unknown.log": LINE}
    plan = plans.to_json(make_plan(4, per_host=2, ingest=True))
    folder = imported(tmp_path, {**forged, **others, "logs/worker-1.log": LINE}, "worker-host-0", plan)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == {
        "plan.json", "logs/worker-1.log", "logs/ingest-0.log",
    }  # fmt: skip
    assert (folder / "plan.json").read_text() == plan


def test_the_output_of_the_import_is_that_of_its_host(tmp_path: Path) -> None:
    plan = plans.to_json(make_plan(2, ingest=True))
    folder = imported(tmp_path, {"logs/worker-1.log": LINE, "logs/ingest-0.log": LINE}, "worker-host-1", plan)
    assert [path.name for path in (folder / "logs").iterdir()] == ["worker-1.log"]


def test_a_host_that_is_not_in_the_plan_adds_nothing(tmp_path: Path) -> None:
    folder = imported(tmp_path, {"logs/worker-0.log": LINE, "events.jsonl": b"{}\n"}, "worker-host-7")
    assert [path.name for path in folder.iterdir()] == ["plan.json"]


def test_the_output_of_the_import_is_accepted_from_the_host_that_runs_it(tmp_path: Path) -> None:
    """That is the first deciding host, whatever the order of tasks is."""
    data = plans.to_data(make_plan(2, ingest=True))
    data["tasks"] = data["tasks"][::-1]
    folder = imported(tmp_path, {"logs/ingest-0.log": LINE}, "worker-host-0", json.dumps(data))
    assert [path.name for path in (folder / "logs").iterdir()] == ["ingest-0.log"]


@pytest.mark.parametrize("damage", [{"tasks": 3}, {"limits": {}}, {"version": 999}], ids=str)
def test_nothing_of_a_member_is_imported_if_the_plan_is_damaged(tmp_path: Path, damage: dict[str, Any]) -> None:
    plan = json.dumps({**plans.to_data(make_plan(2, ingest=True)), **damage})
    folder = imported(tmp_path, {"logs/worker-0.log": LINE, "logs/ingest-0.log": LINE}, plan=plan)
    assert [path.name for path in folder.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("damage", [{"roles": []}, {"hosts": []}], ids=str)
def test_no_output_of_the_import_is_accepted_if_no_host_of_the_plan_can_run_it(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    plan = json.dumps({**plans.to_data(make_plan(2, ingest=True)), **damage})
    folder = imported(tmp_path, {"logs/worker-0.log": LINE, "logs/ingest-0.log": LINE}, plan=plan)
    assert [path.name for path in (folder / "logs").iterdir()] == ["worker-0.log"]


def test_any_output_can_be_merged(tmp_path: Path) -> None:
    log = LINE + LINE.replace(b"g1", b"g" + b"9" * 5000) + b"\xff\0\x1b]52;c;\n"
    assert (imported(tmp_path, {"logs/worker-0.log": log}) / "logs" / "worker-0.log").read_bytes() == log


def pieces(tmp_path: Path, *contents: dict[str, bytes]) -> StoredRunFiles:
    for number, files in enumerate(contents, 1):
        piece = tmp_path / "store" / "run" / "logs" / "worker-host-0" / "life" / f"{number:08}"
        piece.parent.mkdir(parents=True, exist_ok=True)
        head = {"version": 1, "files": {name: len(data) for name, data in files.items()}}
        piece.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(files.values()))
    return StoredRunFiles(FolderStore(str(tmp_path / "store")), "run")


def foreign_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "run.json").write_text('{"run": "run", "on": "kubernetes", "adopted": true}')
    (folder / "plan.json").write_text(PLAN)
    return folder


def test_uploaded_output_of_another_users_run_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 10 * len(LINE))
    lines = [LINE.replace(b":01.", b":%02d." % number) for number in range(30)]
    archive = pieces(tmp_path, *({"logs/worker-0.log": line} for line in lines))
    folder = foreign_folder(tmp_path)
    for _ in range(2):
        with pytest.raises(archive_import.TooLarge, match="only part of another user's run was copied"):
            archive_import.import_hosts(archive, folder, ["worker-host-0"])
        assert (folder / "logs" / "worker-0.log").read_bytes() == b"".join(lines[:10])
    shutil.rmtree(tmp_path / "store")
    later = pieces(tmp_path, {"logs/worker-0.log": b"".join(lines[20:])})
    with pytest.raises(archive_import.TooLarge):
        archive_import.import_hosts(later, folder, ["worker-host-0"])
    assert (folder / "logs" / "worker-0.log").stat().st_size == 10 * len(LINE)
    assert {path.name for path in folder.iterdir()} == {"run.json", "plan.json", "logs"}


def numbered(count: int) -> list[bytes]:
    return [LINE.replace(b"| a", b"| %06d" % number) for number in range(count)]


def test_of_uploaded_output_of_another_users_run_only_what_is_kept_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 2000)
    lines = numbered(500)
    archive = pieces(tmp_path, *({"logs/worker-0.log": b"".join(lines[at : at + 10])} for at in range(0, 500, 10)))
    folder = foreign_folder(tmp_path)
    archive_import.import_hosts(archive, folder, ["worker-host-0"], log_limit=1600)
    kept = list(archive_import._lines(folder / "logs" / "worker-0.log"))
    assert kept == lines[-len(kept) :] and 1200 < sum(map(len, kept)) <= 1600


def test_long_lines_of_another_users_run_count_although_they_exceed_the_limit_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a log is in the plan, which that user has written."""
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 5000)
    long = LINE[:-1] + b"x" * 1000 + b"\n"
    archive = pieces(tmp_path, *({f"logs/worker-{number}.log": long} for number in range(50)))
    folder = foreign_folder(tmp_path)
    with pytest.raises(archive_import.TooLarge):
        archive_import.import_hosts(archive, folder, ["worker-host-0"], log_limit=1)
    assert sum(path.stat().st_size for path in (folder / "logs").iterdir()) <= 5000 + len(long)


def test_few_of_many_logs_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_import, "MOST_OPEN", 4)
    most_open = 0

    class CountedLog(LimitedLog):
        opened: ClassVar[set[str]] = set()

        def write(self, data: bytes) -> bool:
            nonlocal most_open
            self.opened.add(self._path)
            most_open = max(most_open, len(self.opened))
            return super().write(data)

        def close(self) -> None:
            self.opened.discard(self._path)
            super().close()

    monkeypatch.setattr(archive_import, "LimitedLog", CountedLog)
    lines = numbered(40)
    archive = pieces(tmp_path, *({f"logs/worker-{number}.log": line for number in range(10)} for line in lines))
    folder = foreign_folder(tmp_path)
    archive_import.import_hosts(archive, folder, ["worker-host-0"], log_limit=800)
    assert most_open == 4 and not CountedLog.opened
    for number in range(10):
        kept = list(archive_import._lines(folder / "logs" / f"worker-{number}.log"))
        assert kept == lines[-len(kept) :] and 500 < sum(map(len, kept)) <= 800


def test_uploaded_names_of_another_users_run_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_import, "MOST_FILES", 10)
    archive = pieces(tmp_path, {f"logs/worker-{number}.log": b"" for number in range(50)})
    folder = foreign_folder(tmp_path)
    with pytest.raises(archive_import.TooLarge):
        archive_import.import_hosts(archive, folder, ["worker-host-0"])
    assert len(list((folder / "logs").iterdir())) == 10


@pytest.mark.parametrize(
    "data",
    [b"x" * (3 << 20), b"\n" * 300_000, (LINE[:-1] + b"x" * 100_000 + b"\n") * 30],
    ids=["one line", "empty lines", "long lines"],
)
def test_merging_needs_little_memory_whatever_the_lines_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(archive_import, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(archive_import, "GROUP_LINES", 1000)
    monkeypatch.setattr(archive_import, "RECENT_BYTES", 1 << 17)
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(data)
    other.write_bytes(b"")
    tracemalloc.start()
    with (tmp_path / "merged").open("wb") as target:
        target.writelines(archive_import.merged(archive_import._lines(one), archive_import._lines(other)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert (tmp_path / "merged").read_bytes().replace(b"\n", b"") == data.replace(b"\n", b"")


def test_a_store_that_does_not_respond_ends_the_import_at_its_time_limit(tmp_path: Path) -> None:
    is_released = threading.Event()

    class SlowStore(FolderStore):
        def read(self, name: str, most: int) -> bytes | None:
            is_released.wait(30)
            return super().read(name, most)

    pieces(tmp_path, {"logs/worker-0.log": LINE})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "plan.json").write_text(PLAN)
    archive, began = StoredRunFiles(SlowStore(str(tmp_path / "store")), "run"), time.monotonic()
    try:
        with pytest.raises(StoreError, match="did not respond within the time limit"):
            archive_import.import_hosts(archive, folder, ["worker-host-0"], until=began + 0.2)
        assert time.monotonic() - began < 15
    finally:
        is_released.set()
