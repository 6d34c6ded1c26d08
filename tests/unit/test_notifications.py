"""Notifications: which events they tell, and how; each once, however often files and receivers change."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline import job, plan
from paceline.agent.deliveries import http_requests, webhook_delivery
from paceline.agent.deliveries.addresses import addresses_of
from paceline.agent.deliveries.event_reader import EventReader
from paceline.agent.deliveries.http_requests import DeliveryError, send
from paceline.agent.deliveries.notifications import Notification, notification
from paceline.agent.deliveries.schedule import Schedule
from paceline.agent.deliveries.webhook_delivery import WebhookDelivery
from paceline.agent.event_file import OLD, EventFile
from paceline.agent.redaction import Redactor
from paceline.backends import certificates
from paceline.backends.kubernetes.objects.run_objects import render
from paceline.backends.local.host_shares import CannotRun, check_addresses
from paceline.job import planning
from support import recorded
from support.webhooks import Receiver, receiving


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return recorded.event(0, kind, **fields)


HEAD = "name: digits\nframework: none\ncommand: [python, train.py]\n"
ENDED = event("run-ended", status="failed", reason="worker-0 failed: a < b & c", cause="program-error")
RESTART = event(
    "restart", generation=1, cause="signal", task="worker-1", detail="SIGKILL", scope="group", count=1, limit=10
)
HANG = event("hang", tasks=["worker-0", "worker-1"], silent_s=601.2, limit_s=600, progress="step")


# ---- what a notification says


def notice_of(of: Mapping[str, Any]) -> Notification:
    sent = notification(of, "digits-3f9a", "digits")
    assert sent is not None
    return sent


def test_the_body_says_what_happened_to_which_run() -> None:
    assert notice_of(RESTART).body == {
        "version": 1,
        "id": notice_of(RESTART).id,
        "run": "digits-3f9a",
        "job": "digits",
        "event": "restart",
        "at": RESTART["at"],
        "generation": 1,
        "text": "digits-3f9a is restarting after a failure of worker-1 (signal): SIGKILL",
        "details": {name: RESTART[name] for name in RESTART if name not in ("at", "event", "generation")},
    }


@pytest.mark.parametrize(
    ("of", "kind", "text"),
    [
        (ENDED, "failed", "digits-3f9a failed: worker-0 failed: a < b & c"),
        ({**ENDED, "status": "succeeded"}, "succeeded", "digits-3f9a succeeded"),
        ({**ENDED, "status": "stopped", "reason": "interrupted"}, "stopped", "digits-3f9a was stopped: interrupted"),
        (HANG, "hang", "digits-3f9a hangs: no step from worker-0, worker-1 for 601 s"),
    ],
)
def test_each_kind_has_a_text(of: dict[str, Any], kind: str, text: str) -> None:
    assert (notice_of(of).kind, notice_of(of).body["text"]) == (kind, text)


def test_other_events_are_not_told() -> None:
    for other in (event("step", task="worker-0", step=3), event("warning", text="a"), event("recovered"), {}):
        assert notification(other, "digits-3f9a", "digits") is None


@pytest.mark.parametrize(
    "mention", ["@channel", "@here", "@all", "@everyone", "<!channel>", "<!here|here>", "<@U0123>"]
)
def test_a_program_cannot_call_everybody_in_a_channel(mention: str) -> None:
    sent = notice_of({**ENDED, "reason": f"worker-0 failed: ValueError: ({mention}) no"})
    text = json.loads(sent.encoded("slack"))["text"]
    assert mention not in text and not re.search(r"@\w|<", text)
    assert mention in json.loads(sent.encoded("json"))["text"], "programs read this"


def test_slack_gets_a_text_without_markup() -> None:
    assert json.loads(notice_of(ENDED).encoded("slack")) == {
        "text": "digits-3f9a failed: worker-0 failed: a &lt; b &amp; c"
    }


def test_the_id_differs_between_events_and_runs() -> None:
    other_run = notification(RESTART, "digits-3f9b", "digits")
    assert other_run is not None
    later = notice_of({**RESTART, "at": "2026-11-15T04:30:11.124Z"})
    assert len({notice_of(RESTART).id, notice_of(ENDED).id, later.id, other_run.id}) == 4


def test_long_texts_are_shortened() -> None:
    body = notice_of({**ENDED, "reason": "a" * 10_000}).body
    assert len(body["text"]) == len(body["details"]["reason"]) == 4000


# ---- each event once


@pytest.fixture
def file(tmp_path: Path) -> EventFile:
    return EventFile(str(tmp_path), pytest.fail, limit=20_000)


def write(file: EventFile, number: int) -> None:
    steps = [event("step", task="worker-0", step=number * 10 + each) for each in range(10)]
    for line in (*steps, event("note", text=f"{number}")):
        assert file.write(json.dumps(line).encode() + b"\n", line)


def texts(reader: EventReader) -> list[int]:
    numbers = []
    while events := reader.read():
        for each, position in events:
            numbers += [int(each["text"])] if each["event"] == "note" else []
            reader.advance(position)
    return numbers


def test_a_reader_continues_where_the_previous_one_stopped(file: EventFile, tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    write(file, 1)
    reader = EventReader(str(tmp_path), state)
    assert texts(reader) == [1]
    reader.save()
    write(file, 2)
    assert texts(reader) == [2]
    assert texts(EventReader(str(tmp_path), state)) == [2], "it was not saved"
    assert texts(EventReader(str(tmp_path), str(tmp_path / "other.json"))) == [1, 2]


@pytest.mark.parametrize("every", [1, 7, 40])
def test_no_event_is_lost_or_repeated_when_the_file_is_replaced(file: EventFile, tmp_path: Path, every: int) -> None:
    """`every`: how many events there are between two looks. With 40, the file is replaced twice in between, and often
    gets the inode that it had before."""
    read: list[int] = []
    for number in range(1, 201):
        write(file, number)
        if number % every == 0:
            reader = EventReader(str(tmp_path), str(tmp_path / "state.json"))
            read += texts(reader)
            reader.save()
    assert (tmp_path / OLD).exists()
    assert read == list(range(1, 200 // every * every + 1))


def test_a_rotation_repeats_nothing_if_the_last_event_before_it_was_a_frequent_one(
    file: EventFile, tmp_path: Path
) -> None:
    """events.old.jsonl does not contain it."""
    reader = EventReader(str(tmp_path), str(tmp_path / "state.json"))
    read: list[int] = []
    for number in range(1, 101):
        write(file, number)
        used = event("resources", host="worker-host-0", cpu_s=1.0)
        assert file.write(json.dumps(used).encode() + b"\n", used)
        read += texts(reader)
    assert (tmp_path / OLD).exists()
    assert read == list(range(1, 101))


def test_steps_are_not_read_again_and_again(file: EventFile, tmp_path: Path) -> None:
    write(file, 1)
    reader = EventReader(str(tmp_path), str(tmp_path / "state.json"))
    texts(reader)
    step = event("step", task="worker-0", step=99)
    file.write(json.dumps(step).encode() + b"\n", step)
    assert reader.read() == []
    assert reader.position.offset == (tmp_path / "events.jsonl").stat().st_size


def test_a_damaged_or_unfinished_line_is_skipped(tmp_path: Path) -> None:
    note = json.dumps(event("note", text="1")).encode()
    (tmp_path / "events.jsonl").write_bytes(b"{damaged\n[]\n" + note + b"\n" + note[:20])
    reader = EventReader(str(tmp_path), str(tmp_path / "state.json"))
    assert texts(reader) == [1]
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(note[20:] + b"\n")
    assert texts(reader) == [1]


def test_a_damaged_state_is_ignored(file: EventFile, tmp_path: Path) -> None:
    write(file, 1)
    (tmp_path / "state.json").write_text('{"inode": []}')
    assert texts(EventReader(str(tmp_path), str(tmp_path / "state.json"))) == [1]


# ---- receivers


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


class Impatient(Schedule):
    """Waits are recorded, not waited for."""

    def __init__(self) -> None:
        super().__init__(end_s=1000.0)
        self.waits: list[float] = []
        self.clock = 0.0
        self._ending.wait = self._pass  # type: ignore[method-assign, assignment]
        self._closed.wait = self._pass  # type: ignore[method-assign, assignment]

    def _pass(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.clock += seconds
        return False

    def now(self) -> float:  # type: ignore[override]
        return self.clock


class Delivery:
    def __init__(self, folder: Path, *events: dict[str, Any], **fields: Any) -> None:
        (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
        self.schedule, self.warnings = Impatient(), list[str]()
        self.environment: dict[str, str] = {}
        self._reader = EventReader(str(folder), str(folder / "notify-0.json"))
        self._webhook = plan.Webhook(**fields)

    def run(self) -> str:
        """Returns what was not delivered."""
        delivery = WebhookDelivery(
            self._webhook, "notify[0]", self._reader, "digits-3f9a", "digits", self.environment, self.schedule,
            self.warnings.append,
        )  # fmt: skip
        self.schedule.end()
        delivery.run()
        return delivery.undelivered()


def test_only_what_was_asked_for_is_sent(tmp_path: Path, receiver: Receiver) -> None:
    delivery = Delivery(tmp_path, HANG, RESTART, ENDED, url=receiver.url, on=("hang", "failed"))
    assert delivery.run() == ""
    assert [each["event"] for each in receiver.accepted] == ["hang", "failed"]
    assert receiver.headers[0]["Paceline-Notification"] == receiver.accepted[0]["id"]
    assert receiver.headers[0]["Content-Type"] == "application/json"
    delivery.run()
    assert len(receiver.accepted) == 2, "nothing is repeated"


def test_a_receiver_that_fails_is_tried_again_in_order(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers = [500, 429, (503, {"Retry-After": "77"}), 502]
    delivery = Delivery(tmp_path, RESTART, ENDED, url=receiver.url, on=("restart", "failed"))
    assert delivery.run() == ""
    assert [each["event"] for each in receiver.accepted] == ["restart", "failed"]
    assert delivery.schedule.waits == [1, 2, 4, 4], "after the end, they are short"
    host = receiver.url.split("/")[2]
    assert delivery.warnings == [
        f"cannot send notifications to notify[0] ({host}): HTTP 503 Service Unavailable; retrying"
    ]


def test_during_the_run_the_waits_grow_and_receivers_may_ask_for_longer_ones() -> None:
    schedule = Impatient()
    assert all(schedule.wait_to_retry(attempt) for attempt in range(1, 9))
    assert schedule.wait_to_retry(1, 77.0)
    assert schedule.waits == [1, 2, 4, 8, 16, 32, 60, 60, 77]


def test_a_notification_that_is_refused_does_not_block_the_next(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers = [400]
    delivery = Delivery(tmp_path, RESTART, ENDED, url=receiver.url, on=("restart", "failed"))
    host = receiver.url.split("/")[2]
    assert delivery.run() == f"1 notification was not delivered to notify[0] ({host})"
    assert [each["event"] for each in receiver.accepted] == ["failed"]
    assert delivery.warnings == [
        f"notify[0] ({host}) did not accept a notification (restart), which is dropped: HTTP 400 Bad Request"
    ]


def test_a_notification_is_dropped_after_an_hour(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers = [500] * 4
    monkeypatch.setattr(webhook_delivery, "GIVE_UP_S", 5.0)
    delivery = Delivery(tmp_path, RESTART, ENDED, url=receiver.url, on=("restart", "failed"))
    assert delivery.run().startswith("1 notification was not delivered")
    assert [each["event"] for each in receiver.accepted] == ["failed"]


def test_what_is_left_when_the_time_is_over_is_counted(tmp_path: Path) -> None:
    delivery = Delivery(tmp_path, RESTART, ENDED, url="http://127.0.0.1:1/hook", on=("restart", "failed"))
    assert delivery.run() == "2 notifications were not delivered to notify[0] (127.0.0.1:1): Connection refused"
    assert sum(delivery.schedule.waits) >= 1000


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    for status in (301, 302, 303, 307, 308):
        receiver.answers = [(status, {"Location": receiver.url.replace("hooks", "elsewhere")})]
        with pytest.raises(DeliveryError, match=f"HTTP {status} .*: redirects are not followed") as caught:
            send("POST", receiver.url, b"{}", {})
        assert not caught.value.retry
    assert set(receiver.requests) == {"POST /hooks/secret-part-of-the-address"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "the variable HOOK is not set"),
        ("file:///etc/passwd", "the address in HOOK must begin with https:// or http://"),
        ("https://", "the address in HOOK has no host name"),
        ("https://a:b@example.com/", "the address in HOOK must not contain a user name or a password"),
        ("https://example.com:port/", "the address in HOOK is not a valid address"),
        (
            "https://example.com/a b",
            "the address in HOOK contains a space, or a character that must be percent-encoded",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_reported(tmp_path: Path, value: str, problem: str) -> None:
    delivery = Delivery(tmp_path, ENDED, url_from="HOOK")
    delivery.environment = {"HOOK": value}
    assert delivery.run() == f"1 notification was not delivered to notify[0]: {problem}"
    assert delivery.warnings == [f"notify[0]: {problem}; no notifications are sent to it"]


def test_errors_do_not_contain_the_address() -> None:
    for url in ("http://127.0.0.1:1/secret-part", "http://secret-part.invalid/secret-part", "http://secret-part..a/"):
        with pytest.raises(DeliveryError) as caught:
            send("POST", url, b"{}", {})
        assert "secret-part" not in str(caught.value) and caught.value.retry


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b""])
def test_a_server_that_sends_byte_by_byte_is_left(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "LONGEST", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    is_left = threading.Event()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(begin)
            while True:
                try:
                    connection.sendall(b"x" if begin else b"HTTP/1.1 100 Go\r\n\r\n")
                except OSError:
                    break
                time.sleep(0.01)
        is_left.set()

    server = threading.Thread(target=trickle, daemon=True)
    server.start()
    with listener, pytest.raises(DeliveryError, match="no complete response within") as caught:
        send("POST", f"http://127.0.0.1:{listener.getsockname()[1]}/", b"{}", {})
    assert caught.value.retry and is_left.wait(20)
    server.join()


def test_a_certificate_of_an_unknown_authority_is_not_accepted(tmp_path: Path) -> None:
    certificates.make(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "captain.pem", tmp_path / "captain.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        connection, _ = listener.accept()
        with connection, pytest.raises(OSError):
            context.wrap_socket(connection, server_side=True).recv(1)

    server = threading.Thread(target=accept)
    server.start()
    with listener, pytest.raises(DeliveryError, match="its certificate is not valid: "):
        send("POST", f"https://127.0.0.1:{listener.getsockname()[1]}/", b"{}", {})
    server.join()


def test_no_attempt_is_made_after_the_end() -> None:
    schedule = Schedule(end_s=0.0)
    schedule.end()
    assert not schedule.wait_to_retry(1)
    closed = Schedule()
    waiting = threading.Thread(target=closed.close)
    waiting.start()
    waiting.join()
    assert not closed.wait_to_retry(5)


# ---- the job


def load(text: str, folder: Path, cluster: bool = False) -> plan.Plan:
    (folder / "train.py").touch()
    return planning.make_plan(job.load_text(HEAD + text, "job.yaml", folder, cluster=cluster).job)


def problems(text: str, folder: Path, cluster: bool = False) -> list[str]:
    with pytest.raises(job.JobError) as caught:
        load(text, folder, cluster)
    return [f"{problem.what}; {problem.remedy}" for problem in caught.value.problems]


KINDS = "allowed: failed, succeeded, stopped, hang, restart"
MISTAKES = {
    "{url: https://example.com}": "notify: must be a list of mappings, got a mapping; put it in a list: [{...}]",
    "[https://example.com]": 'notify.0: must be a mapping, got the string "https://example.com"; '
    "allowed: format, on, url, url_from",
    "[{}]": "notify.0: a receiver needs one of url, url_from; ",
    "[{url: http://a/, url_from: B}]": "notify.0.url_from: a receiver must have exactly one of url, url_from, "
    "got url, url_from; remove url or url_from",
    "[{urll: http://a/}]": 'notify.0.urll: unknown key "urll"; did you mean "url"?; allowed: format, on, url, url_from',
    "[{url: ftp://a/}]": "notify.0.url: the address must begin with https:// or http://; "
    "put a secret address in a variable, and write url_from: NAME",
    "[{url: 'http://a:b@c/'}]": "notify.0.url: the address must not contain a user name or a password; "
    "put a secret address in a variable, and write url_from: NAME",
    "[{url: 3}]": "notify.0.url: must be an address, got the number 3; write https://example.com/hook",
    "[{url_from: a-b}]": 'notify.0.url_from: "a-b" is not a valid variable name; did you mean "a_b"?; '
    "allowed: letters, digits and _, not starting with a digit",
    "[{url: http://a/, on: []}]": f"notify.0.on: is empty: the receiver would never be notified; {KINDS}",
    "[{url: http://a/, on: failed}]": 'notify.0.on: must be a list of names, got the string "failed"; write [failed]',
    "[{url: http://a/, on: [failure]}]": 'notify.0.on.0: "failure" is not a valid value; did you mean "failed"?; '
    f"{KINDS}",
    "[{url: http://a/, format: text}]": 'notify.0.format: "text" is not a valid value; allowed: json, slack',
    f"[{', '.join(['{url: http://a/}'] * 21)}]": "notify: has 21 receivers; a job can have at most 20; ",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_wrong_receiver(text: str, tmp_path: Path) -> None:
    assert problems(f"notify: {text}\n", tmp_path) == [MISTAKES[text]]


def test_the_plan_names_the_receivers_and_can_be_read_again(tmp_path: Path) -> None:
    loaded = load("notify: [{url_from: HOOK, on: [hang, hang], format: slack}, {url: http://a/}]\n", tmp_path)
    assert loaded.notify == (
        plan.Webhook("", "HOOK", ("hang",), "slack"),
        plan.Webhook("http://a/", "", ("failed", "succeeded", "stopped"), "json"),
    )
    assert plan.from_data(json.loads(plan.to_json(loaded))) == loaded
    assert "notify" not in plan.to_data(load("", tmp_path)), "plans without receivers look as they always have"


def test_on_a_cluster_the_address_comes_from_a_secret(tmp_path: Path) -> None:
    assert problems("notify: [{url: 'http://a/'}]\n", tmp_path, cluster=True) == [
        "notify.0.url: on a cluster, the address must come from a Secret: others can read the plan of a run; "
        "write url_from: NAME, and add the Secret to kubernetes.env_from"
    ]
    assert problems("notify: [{url_from: HOOK}]\nkubernetes: {image: a}\n", tmp_path, cluster=True) == [
        "notify.0.url_from: names a variable of a Secret, but kubernetes.env_from is empty; "
        "write env_from: [{secret: NAME}] in kubernetes"
    ]


def test_the_captain_gets_the_secret(tmp_path: Path) -> None:
    text = "kubernetes: {image: a, env_from: [{secret: hooks}]}\n"
    for more, expected in (("", None), ("notify: [{url_from: HOOK}]\n", [{"secretRef": {"name": "hooks"}}])):
        loaded = load(text + more, tmp_path, cluster=True)
        objects = render(loaded, "digits-3f9a", b"agent")
        captain = next(each for each in objects if each["metadata"]["name"] == "digits-3f9a" and each["kind"] == "Job")
        container = captain["spec"]["template"]["spec"]["containers"][0]
        assert container.get("envFrom") == expected


def test_a_run_on_this_machine_needs_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("notify: [{url_from: HOOK}]\n", tmp_path)
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(CannotRun, match=r"notify\[0\].url_from: the variable HOOK is not set"):
        check_addresses(loaded)
    monkeypatch.setenv("HOOK", "hooks.example.com/secret-part")
    with pytest.raises(CannotRun, match="the address in HOOK must begin with https:// or http://") as caught:
        check_addresses(loaded)
    assert "secret-part" not in str(caught.value)
    monkeypatch.setenv("HOOK", "https://hooks.example.com/secret-part")
    check_addresses(loaded)


def test_a_placeholder_in_place_of_an_address_is_not_redacted(tmp_path: Path) -> None:
    loaded = load("notify: [{url_from: HOOK}, {url_from: OTHER}, {url_from: NONE}]\n", tmp_path)
    environment = {"HOOK": "x", "OTHER": "https://hooks.example.com/secret-part"}
    assert addresses_of(loaded, environment) == ["https://hooks.example.com/secret-part"]


def test_addresses_are_redacted_whatever_their_variable_is_called() -> None:
    redact = Redactor({}, secrets=["https://hooks.example.com/secret-part"])
    assert redact("cannot send to https://hooks.example.com/secret-part today") == "cannot send to *** today"
