"""Two tenants of one namespace: reading the other's run sends no credential where that run's plan points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.people import Person, eventually
from support.recording_server import recording

pytestmark = pytest.mark.timeout(900, func_only=True)

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAREADERREADER",
    "AWS_SECRET_ACCESS_KEY": "readers-secret-key",
    "AWS_SESSION_TOKEN": "readers-session-token",
}
PROGRAM = "print('trained', flush=True)"


def test_no_credential_of_a_reader_reaches_the_endpoint_of_another_tenants_plan(person: Person, tmp_path: Path) -> None:
    """The endpoint is on this machine, where the reader's commands run; the pods of the run cannot reach it."""
    reader_config = person.cluster.user("eve", person.namespace)
    with recording() as endpoint, recording() as own_store:
        env = {
            "AWS_ENDPOINT_URL": endpoint.url,
            "AWS_REGION": "us-east-1",
            **dict.fromkeys(CREDENTIALS, "of the owner"),
        }
        job = person.job(PROGRAM, 1, env=env, snapshots={"to": "s3://digits/training"})
        submitted = person.call("run", str(job), "--on", "kubernetes", "--detach")
        assert submitted.returncode == 0, submitted.stderr
        run = submitted.stdout.strip()
        endpoint.requests.clear()

        owner_env, person.env = person.env, {**person.env, **CREDENTIALS}
        person.env |= {"KUBECONFIG": str(reader_config), "PACELINE_HOME": str(tmp_path / "reader")}
        try:
            on_cluster = ["--on", "kubernetes"]
            refused = person.call("snapshots", "ls", run, *on_cluster)
            assert refused.returncode == 1 and "your credentials are not sent there" in refused.stderr, refused.stderr
            for verb in (
                ["status"], ["events"], ["logs"], ["snapshots", "show"], ["snapshots", "verify"], ["stacks"],
                ["profile", "--timeout", "1s"], ["wait", "--timeout", "1s"],
            ):  # fmt: skip
                person.call(*verb, run, *on_cluster)
            person.call("ls")
            person.call("metrics", run)
            for verb in (["try", run], ["export", run, "--to", "model"], ["serve", run, "--port", "0"]):
                result = person.call(*verb)
                assert result.returncode != 0, "a program of another tenant was run"
            # Once more when the run has ended: what it uploaded is now looked for in its bucket.
            person.cluster.kubectl("delete", "jobs", "-n", person.namespace, "-l", f"paceline.dev/run={run}")
            eventually("its end", lambda: json.loads(person.call("status", run, "-o", "json").stdout)["ended"])
            for verb in (["logs"], ["events"], ["status"], ["snapshots", "ls"]):
                person.call(*verb, run)
            assert endpoint.requests == []

            # With a store of the reader's own, requests go there; with --endpoint, to the server that the reader names.
            person.env["AWS_ENDPOINT_URL"] = own_store.url
            person.call("snapshots", "ls", run)
            assert own_store.requests and endpoint.requests == []
            person.call("snapshots", "ls", run, "--endpoint", endpoint.url)
            assert endpoint.requests and "AKIAREADERREADER" in endpoint.requests[0]
        finally:
            person.env = owner_env
        # The owner's commands use the settings of their own plan.
        endpoint.requests.clear()
        person.call("snapshots", "ls", run)
        assert endpoint.requests and "AKIAREADERREADER" not in "".join(endpoint.requests)
        assert person.call("delete", "--yes", "--force", run).returncode == 0
