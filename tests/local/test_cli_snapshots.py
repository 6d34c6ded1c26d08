"""Snapshots of real runs, as a user sees them: while a run trains, after it has ended, and after it was deleted."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import person
from support.person import Person, eventually

# Saves snapshots of steps 1 and 2 by the contract alone, the second on request: a snapshot that is not committed when a
# newer one is saved is skipped. Then it continues until it gets a SIGTERM.
SAVING = """
import json, os, signal, sys, time
from pathlib import Path
import paceline

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for step in (1, 2):
    paceline.report(step=step, loss=1 / step)
    partial = Path(os.environ["PACELINE_SNAPSHOT_DIR"], "partial")
    partial.mkdir()
    (partial / "state").write_text(f"state of step {step}")
    (partial / "paceline.json").write_text(json.dumps({"metrics": {"loss": 1 / step}, "versions": {"mine": "7"}}))
    partial.rename(partial.with_name(f"step-{step}"))
    while not Path("go-on").exists():
        time.sleep(0.02)
while "--stay" in sys.argv:
    time.sleep(0.1)
"""


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Person]:
    user = Person(tmp_path)
    with person.nothing_left(user.home):
        yield user


def names(me: Person, *arguments: str) -> list[str]:
    return me.call("snapshots", "ls", *arguments, "-o", "name").stdout.split()


def committed(me: Person) -> int | None:
    snapshot = json.loads(me.call("status", "-o", "json").stdout)["committed"]
    return snapshot and snapshot["step"]


@pytest.mark.parametrize("to", ["", "kept"], ids=["own-folder", "elsewhere"])
def test_snapshots_of_a_run_that_trains_stops_and_is_deleted(me: Person, to: str) -> None:
    me.job(SAVING, more=f"snapshots: {{to: {to}}}\n" if to else "")
    (me.folder / "job.yaml").write_text((me.folder / "job.yaml").read_text().replace("train.py]", "train.py, --stay]"))
    run = me.call("run", "--detach").stdout.strip()
    location = me.folder / to if to else me.run_folder() / "snapshots"
    eventually(lambda: committed(me) == 1, "step 1 is committed")
    (me.folder / "go-on").touch()
    eventually(lambda: committed(me) == 2, "step 2 is committed")

    assert names(me) == ["step-2-g1", "step-1-g1"]
    assert me.call("snapshots", "verify", run, "--all").returncode == 0
    snapshot = json.loads(me.call("snapshots", "show", "-o", "json").stdout)
    assert (snapshot["metrics"], snapshot["versions"], snapshot["tasks"]) == (
        {"loss": 0.5},
        {"mine": "7"},
        ["worker-0"],
    )
    assert me.call("snapshots", "get", "--to", "copy").returncode == 0
    assert (me.folder / "copy" / "state").read_text() == "state of step 2"
    refused = me.call("snapshots", "rm", run, "2", "--yes")
    assert refused.returncode == 1 and "is the newest snapshot of" in refused.stderr
    assert me.call("snapshots", "rm", run, "1", "--yes").returncode == 0
    (me.folder / "another-machine").mkdir()
    other = Person(me.folder / "another-machine")
    for command in (["snapshots", "rm", f"{location}/{run}", "2"], ["delete", "--snapshots", f"{location}/{run}"]):
        refused = other.call(*command, "--yes")
        assert refused.returncode == 1 and f"nothing at {location}/{run} reports the end of {run}" in refused.stderr
    assert names(me) == ["step-2-g1"]
    assert me.call("stop").returncode == 0
    assert re.search(rf"  snapshots    step 2 committed .* ago: {location}/{run}/step-2-g1\n", me.call("status").stdout)

    message = me.call("delete", run, "--yes").stderr
    assert message.startswith(f"deleted {run}; its snapshots are kept ") and "`paceline delete --snapshots" in message
    assert me.call("ls", "-o", "name").stdout == ""
    address = message.partition("--snapshots ")[2].partition("`")[0]
    assert names(me, address) == ["step-2-g1"]
    assert me.call("delete", "--snapshots", address, "--yes").returncode == 0
    assert not (location / run).exists() and list((me.home / "runs").iterdir()) == []


def test_the_report_of_a_run_ends_with_its_newest_committed_snapshot(me: Person) -> None:
    me.job(SAVING)
    (me.folder / "go-on").touch()
    result = me.call("run")
    folder = me.run_folder()
    assert result.returncode == 0, result.stderr
    snapshot = f"{folder}/snapshots/{folder.name}/step-2-g1"
    # Whether step 1 is committed before step 2 is saved depends on the machine.
    shown = rf"^  snapshots    (1 skipped, )?step 2 committed: {re.escape(snapshot)}$"
    assert re.search(shown, result.stderr, re.M), result.stderr
