"""Receivers are told what happens to a run, once, whatever fails in between; the run does not wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.agent.deliveries.event_reader import EventReader
from support.pods import Pods
from support.runs import Run, Starter, eventually, finish, job, kill, orders
from support.webhooks import Receiver, receiving

ALL = ["failed", "succeeded", "stopped", "hang", "restart"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


def without_address(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"secret-part" not in path.read_bytes(), path


def delivering(run: Run) -> int:
    """The pid of the process that makes deliveries."""
    name = "paceline.agent.deliveries.process"

    def check() -> int:
        below = [psutil.Process(pid) for pid in run.below(run.agent("captain"))]
        return next((process.pid for process in below if name in process.cmdline()), 0)

    return eventually("the process that makes deliveries", check, more=run.story)


def is_saved(run: Run, kind: str) -> bool:
    """Whether the next process that makes deliveries knows that the first receiver was told of this."""
    left = EventReader(str(run.folder), str(run.folder / "deliveries" / "notify-0.json")).read()
    return all(event["event"] != kind for event, _ in left)


def test_each_thing_is_told_once_although_everything_fails_in_between(
    start: Starter, state: Path, receiver: Receiver
) -> None:
    receiver.answers = [503, 500]
    notify = [{"url_from": "HOOK", "on": ALL}, {"url_from": "HOOK", "format": "slack"}]
    run = start(job(orders("none", state), workers=1, notify=notify), env={"HOOK": receiver.url})
    run.all_step()
    kill(run.task("worker-0"))
    eventually("the restart is told", lambda: receiver.accepted, more=run.story)
    assert len(receiver.requests) == 3, "two of them failed"
    eventually("the delivery is saved", lambda: is_saved(run, "restart"), more=run.story)
    kill(delivering(run))
    kill(run.agent("captain"))
    run.wait("captain-returned")
    delivering(run)
    run.wait_for_step(generation=2)
    report = finish(run, state)
    restart, *ends = receiver.accepted
    assert (restart["event"], restart["run"], restart["job"]) == ("restart", run.folder.name, "attack")
    assert restart["details"]["cause"] == "signal" and "SIGKILL" in restart["text"]
    assert sorted(end.get("event", end["text"]) for end in ends) == [f"{run.folder.name} succeeded", "succeeded"]
    assert "undelivered" not in report
    without_address(run.folder)


def test_the_captains_pod_notifies_an_address_of_a_secret(tmp_path: Path, receiver: Receiver) -> None:
    fields = {"notify": [{"url_from": "HOOK"}], "kubernetes": {"env_from": [{"secret": "hooks"}]}}
    pods = Pods(tmp_path, env={"HOOK": receiver.url}, **fields)
    pods.all()
    assert set(pods.codes().values()) == {0}
    assert [(each["run"], each["event"]) for each in receiver.accepted] == [("tiny-0000", "succeeded")]
    without_address(tmp_path)


def test_a_receiver_that_is_away_does_not_hold_the_run_back(start: Starter, state: Path, receiver: Receiver) -> None:
    receiver.answers = [404]
    run = start(job(orders("none", state), workers=1, notify=[{"url": receiver.url, "on": ["succeeded"]}]))
    run.all_step()
    report = finish(run, state)
    host = receiver.url.split("/")[2]
    text = f"1 notification was not delivered to notify[0] ({host}): HTTP 404 Not Found"
    assert report["undelivered"] == [text]
    assert [event["text"] for event in run.events("warning")][-1] == text
    assert text in run.said()
