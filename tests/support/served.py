"""The objects of a served model, rendered for jobs of two kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.backends.kubernetes.objects import serving_objects
from paceline.job import load_text, planning

RUN = "digits-3f9a"
AGENT = b"agent"
HEAD = "name: digits\ncommand: [python, train.py]\nexport: {command: [python, train.py, export]}\n"


Object = dict[str, Any]

JOBS = {
    # No registry that tests can use has TensorFlow Serving: its command is only checked here.
    "tensorflow-serving": (
        "framework: tensorflow\nserve: {replicas: 2, memory: 2Gi, service: NodePort}\n"
        "kubernetes: {image: registry.example/tf:1, namespace: team-a, env_from: [{secret: store}]}\n"
        "limits: {start: 10m}\n",
        "s3://training/digits",
    ),
    "paceline-serve": (
        "framework: torch\nserve: {image: 'registry.example/serve:1', cpu: 2, gpus: 1}\ncode: image\n"
        "credentials: {secret: gcs-key, file: key.json}\n"
        "kubernetes:\n  image: registry.example/torch:1\n  user: 4242\n  image_pull_secrets: [pull]\n"
        "  volumes: [{mount: /data, claim: data, read_only: true}]\n",
        "claim://kept/of digits",
    ),
}  # fmt: skip


def rendered(
    which: str,
    folder: Path,
    snapshot: str = "step-120-g3",
    code: tuple[bytes, ...] = (),
    more: str = "",
    agent: bytes = AGENT,
) -> list[Object]:
    (folder / "train.py").touch()
    text, location = JOBS[which]
    plan = planning.make_plan(load_text(HEAD + text + more, "job.yaml", folder, cluster=True).job)
    model = serving_objects.Model("digits", snapshot, location, needs_one_node=location.startswith("claim://"))
    library = (b"book one", b"book two") if location.startswith("s3://") else ()
    return serving_objects.render(plan, RUN, model, agent, code, library)
