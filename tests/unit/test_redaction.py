"""Secrets in the texts of errors are replaced before these texts become events and reports."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.captain_process.event_log import EventLog
from paceline.agent.redaction import Redactor, looks_secret
from paceline.job import load_text

SECRETS = {
    "HF_TOKEN": "hf_abcdefgh",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPx",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "DB_PASSWORD": 'it\'s a "secret"\\ one',
    "WANDB_API_KEY": "0123456789abcdef",
    "SSH_PRIVATE_KEY": "-----BEGIN KEY-----\nabcdefghijklmnopqrstuvwxyz\n0123456789012345\n-----END KEY-----",
    "AZURE_STORAGE_ACCOUNT_KEY": "c3RvcmFnZSBrZXk=",
    "my_service_credentials": "user-and-password",
}
OTHERS = {
    "HOME": "/home/ada-lovelace", "TOKENIZERS_PARALLELISM": "disabled", "MAX_TOKENS": "10000000",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token", "GOOGLE_APPLICATION_CREDENTIALS": "/etc/key.json",
    "TOKEN_URL": "https://login.example", "API_KEY": "short", "PWD": "/work/training", "KEYBOARD": "qwertyuiop",
}  # fmt: skip


def test_names_decide_what_looks_like_a_secret() -> None:
    assert [name for name, value in (SECRETS | OTHERS).items() if looks_secret(name, value)] == list(SECRETS)


@given(st.sampled_from(sorted(SECRETS)), st.text(max_size=20), st.text(max_size=20))
def test_no_text_contains_a_secret_in_any_of_its_forms(name: str, before: str, after: str) -> None:
    redact = Redactor({}, SECRETS | OTHERS)
    value = SECRETS[name]
    for form in (value, repr(value), json.dumps(value), f"{{'key': {value!r}}}"):
        shown = redact(f"{before}{form}{after}")
        assert value not in shown and repr(value)[1:-1] not in shown and "***" in shown


def test_other_texts_stay_as_they_are() -> None:
    redact = Redactor(SECRETS | OTHERS)
    for text in ("", "ValueError: no", *OTHERS.values(), "user@example.org", "s3://bucket/a:b@c", "10:30 me@host"):
        assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open postgres://ada:pass@db/x", "cannot open postgres://***@db/x"),
        ("http://:pw@127.0.0.1:9 and https://a:b@c/", "http://***@127.0.0.1:9 and https://***@c/"),
        ("key -----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- end", "key *** end"),
        ("cut -----BEGIN PRIVATE KEY-----\nabc", "cut ***"),
    ],
)
def test_passwords_in_urls_and_keys_are_redacted_wherever_they_come_from(text: str, shown: str) -> None:
    assert Redactor()(text) == shown


def test_a_secret_that_contains_another_is_replaced_as_a_whole() -> None:
    assert Redactor({"A_TOKEN": "12345678", "B_TOKEN": "123456789"})("x 123456789 y 12345678") == "x *** y ***"


def test_lines_of_a_secret_are_recognized_alone() -> None:
    assert Redactor(SECRETS)("  abcdefghijklmnopqrstuvwxyz") == "  ***"


def test_events_are_redacted_but_not_their_names_and_numbers(tmp_path: Path) -> None:
    redact = Redactor({"A_TOKEN": "worker-0", "B_TOKEN": "program-error"})
    log = EventLog(str(tmp_path), None, print, redact)
    log.write("restart", 1, {"task": "worker-0", "cause": "program-error", "detail": "bad key worker-0", "delay_s": 1})
    log.write("run-ended", 1, {"reason": "s3://a:b@c", "status": "failed"})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (events[0]["task"], events[0]["cause"], events[0]["detail"]) == ("worker-0", "program-error", "bad key ***")
    assert events[1]["reason"] == "s3://***@c"
    report = {
        "reason": "worker-0", "restarts": [{"task": "worker-0", "detail": "of worker-0"}], "steps": 3,
        "stacks": {"worker-0": "in worker-0"}, "skipped": ("worker-0",), "metrics": {"worker-0": {"loss": 0.1}},
    }  # fmt: skip
    assert redact.texts(report) == {
        "reason": "***", "restarts": [{"task": "worker-0", "detail": "of ***"}], "steps": 3,
        "stacks": {"worker-0": "in ***"}, "skipped": ["***"], "metrics": {"worker-0": {"loss": 0.1}},
    }  # fmt: skip


@pytest.mark.parametrize("cluster", [False, True])
def test_a_secret_in_a_job_file_is_noted_without_its_value(cluster: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    job: dict[str, Any] = {"name": "digits", "framework": "none", "command": ["python", "train.py"]}
    job["env"] = {"API_TOKEN": "hf_abcdefgh"}
    job |= {"roles": {"worker": {"replicas": 1, "env": {"DB_PASSWORD": "12345678", "SEED": "12345678"}}}}
    job |= {"kubernetes": {"image": "x:1"}} if cluster else {}
    (note,) = load_text(json.dumps(job), "job.yaml", tmp_path, cluster=cluster).notes
    instead = "use a Secret and kubernetes.env_from" if cluster else "set it in your shell instead"
    assert note.startswith("env.API_TOKEN, roles.worker.env.DB_PASSWORD: a secret in a job file is written to")
    assert note.endswith(instead) and "hf_" not in note


def test_an_unreachable_store_is_named_without_the_password_in_its_address() -> None:
    from paceline.storage.stores.bucket import BucketStore
    from paceline.storage.stores.protocol import StoreError

    with socket.socket() as closed:  # bound, so that no other process listens there
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        settings = {"AWS_ENDPOINT_URL": f"http://me:password@127.0.0.1:{port}", "AWS_SKIP_SIGNATURE": "true"}
        with pytest.raises(StoreError, match=rf"no response from http://127\.0\.0\.1:{port}$"):
            BucketStore("s3://training", 0.2, settings).names("x")
