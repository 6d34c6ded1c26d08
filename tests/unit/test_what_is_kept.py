"""docs/what-is-kept.md states the limits that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline import plan
from paceline.agent import event_file, limited_log, profile_messages, series_files, state_events
from paceline.agent.captain import start_times
from paceline.agent.captain.snapshots import incomplete_snapshots
from paceline.agent.captain_process import event_log
from paceline.agent.transfers import host_snapshots, log_upload, stored_events
from paceline.backends.kubernetes.objects import pods
from paceline.storage import compiled_files
from paceline.storage.snapshots import generation_records

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "what-is-kept.md").read_text()
WORDS = dict(enumerate(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")))
ORDINALS = {8: "eighth"}
SERIES = {tier: parts * series_files.PART for tier, parts in series_files._KEPT_PARTS.items()}


def size(count: float) -> str:
    unit, name = next((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= unit)
    return f"{count / unit:g} {name}"


# The beginning of a row or of a sentence, and what it has to contain.
STATED = [
    ("| [output of tasks](#logs)", f"by default {size(plan.LOG_LIMIT)}"),
    ("| [events](#events-and-series)", f"{size(event_file.LIMIT)};"),
    ("| `events.old.jsonl`", f"{size(event_file.OLD_LIMIT)}; then the older half is deleted"),
    ("| all events, except resources", f"one every {event_log.STEP_EVERY_S / 60:g} minutes for each task"),
    ("| all events, except resources", f"about {round(stored_events.MOST + stored_events.CHECK_EVERY, -2)} files"),
    ("| all events, except resources", f"usually of {size(log_upload.LARGE)} each"),
    ("| all events, except resources", f"more than {stored_events.MOST}, the older half"),
    ("| all events, except resources", f"keeps {size(event_log.UPLOADED_LIMIT)} of them"),
    ("| [steps, reported metrics", f"{size(sum(SERIES.values()))};"),
    ("| report", f"the last {state_events.RESTARTS_KEPT} restarts, the starts of the last {start_times.KEPT} gen"),
    ("| saved snapshots", f"its parts of {WORDS[incomplete_snapshots.MOST]} incomplete ones"),
    ("| copies of committed snapshots", f"{WORDS[host_snapshots.MAX_COPIES]}, and the one that is being evaluated"),
    ("| committed snapshots", f"by default the newest {WORDS[plan.KEEP]};"),
    ("| generation records", f"at least the newest {generation_records.KEPT} "),
    ("| TensorBoard's files", f"of a task: {size(profile_messages.MOST_BYTES)} "),
    ("| compiled code", f"[{size(compiled_files.MOST_BYTES)} and {compiled_files.MOST_FILES:,} files]"),
    ("| compiled code", f"the copy: {size(compiled_files.MOST_STORED)} for each pod"),
    ("| Jobs, pods and other objects", f"by default {WORDS[round(plan.KEEP_FINISHED / 3600)]} hour "),
    ("The newest part of the output", f"reaches an {ORDINALS[limited_log.PARTS]} of `limits.log`"),
    ("- On a cluster with a bucket", f"every {log_upload.EVERY:g} s, or whenever there are {size(log_upload.LARGE)}"),
    ("- Pods have a volume for logs", f"captain's pod requests {pods.CAPTAIN_DISK[:-2]} MiB"),
    ("| `events.jsonl`", f"| {size(event_file.LIMIT)};"),
    ("| `series/1/`", f"| {size(SERIES[1])} |"),
    ("| `series/10/`", f"| {size(SERIES[10])} |"),
    ("| `series/300/`", f"| {size(SERIES[300])};"),
    ("At a snapshot location", f"more than {stored_events.MOST}, which"),
    ("At a snapshot location", f"all but the newest {stored_events.KEPT} are replaced"),
]


@pytest.mark.parametrize(("begin", "text"), STATED)
def test_the_stated_limit_is_that_of_the_code(begin: str, text: str) -> None:
    blocks = re.split(r"\n(?=\n|\||- )", PAGE)
    rows = [" ".join(block.split()) for block in blocks if block.strip().startswith(begin)]
    assert any(text in row for row in rows), rows


def test_the_page_about_snapshots_states_how_many_incomplete_ones_are_kept() -> None:
    text = " ".join((DOCS / "snapshots.md").read_text().split())
    oldest, newest = WORDS[incomplete_snapshots.OLDEST], WORDS[incomplete_snapshots.NEWEST]
    assert f"others have not: at most {WORDS[incomplete_snapshots.MOST]}." in text
    assert f"between the oldest {oldest} and the newest {newest}:" in text


def test_the_requested_disk_of_the_captain_is_enough() -> None:
    assert pods.CAPTAIN_DISK.endswith("Mi")
    events = event_file.LIMIT + event_file.OLD_LIMIT + event_log.UPLOADED_LIMIT
    assert int(pods.CAPTAIN_DISK[:-2]) * 2**20 > events + sum(SERIES.values())
