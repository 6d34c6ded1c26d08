"""Makes the screenshots of `paceline page`, docs/images/page-*.png: of real runs on this machine, and one of a made-up
run, which has 1,000 tasks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from support import browser as chromium  # noqa: E402
from support.page_runs import Failure, PastRun, reporting  # noqa: E402
from support.page_server import page_server  # noqa: E402
from support.runs import eventually  # noqa: E402

LARGEST = 300_000  # bytes
EXAMPLE = HERE.parents[1] / "examples" / "torch-ddp"
# name, address, size, theme, what is visible once it is complete
Picture = tuple[str, str, tuple[int, int], str, str]
REAL: tuple[Picture, ...] = (
    ("runs", "", (1280, 430), "light", "table.runs tbody tr >> nth=3"),
    ("timeline", "#/run/digits-3f9a/timeline", (1280, 470), "light", "canvas[data-rows='3']"),
    ("curves", "#/run/digits-3f9a/curves?smooth=0.6", (1280, 860), "dark", ".panel[data-series=loss] .u-over"),
    ("compare", "#/compare?run=digits-3f9a&run=digits-a07e", (1280, 860), "light", ".u-over >> nth=1"),
    ("restarts", "#/run/digits-3f9a/restarts", (1280, 760), "light", ".restart-view pre"),
    ("output", "#/run/digits-3f9a/output?task=*", (1280, 640), "dark", ".line-task >> nth=20"),
    ("phone", "#/run/digits-3f9a", (390, 844), "dark", ".goodput-table tr"),
)
MADE_UP: tuple[Picture, ...] = (
    ("timeline-1000", "#/run/recsys-51c0/timeline?fit=1", (1280, 800), "dark", "canvas[data-rows='1000']"),
)
JOB: dict[str, Any] = {
    "name": "digits", "framework": "torch",
    "roles": {
        "worker": {"replicas": 2, "command": ["python", "train.py", "--epochs", "400", "--every", "50"]},
        "evaluator": {"replicas": 1, "command": ["python", "evaluate.py"]},
    },
    "snapshots": {"keep": 5, "best": {"metric": "test_loss"}},
}  # fmt: skip
EVALUATE = """
import torch
from torch import nn
from train import digits, network

import paceline

images, labels = digits()[1].tensors
model = network()
for snapshot in paceline.snapshots.follow():
    model.load_state_dict(torch.load(snapshot.path / "state.pt", weights_only=True)["model"])
    model.eval()
    with torch.no_grad():
        logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
    snapshot.report(test_loss=loss, test_accuracy=accuracy)
    print(f"step {snapshot.step}: {accuracy:.1%} of {len(labels)} held-out digits read correctly", flush=True)
"""
PROGRESS = "                snapshots.step(step, loss=loss)\n"
PRINTED = f"""{PROGRESS}\
                if step % 10 == 0:
                    print(f"step {{step}}: loss {{loss:.3f}}", flush=True)
"""
BROKEN = """
import paceline

for step in range(1, 100):
    paceline.report(step=step, loss=1 / step)
    print(f"step {step}", flush=True)
    if step == 7:
        raise ValueError("image 4711 has 27 columns instead of 28")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium.launched() as browser:
        home = Path(folder) / "real"
        with _real_runs(Path(folder), home), page_server(home) as server:
            _take(browser, server.address, server.url, REAL)
        home = Path(folder) / "made-up"
        run = PastRun(home, "recsys-51c0", 1000, 2500.0, [Failure(1400.0)], framework="tensorflow")
        with reporting([run]), page_server(home) as server:
            _take(browser, server.address, server.url, MADE_UP)


def _take(browser: Browser, address: str, url: str, pictures: tuple[Picture, ...]) -> None:
    context = browser.new_context()
    context.new_page().goto(address)
    session = context.storage_state()
    context.close()
    for name, route, (width, height), theme, selector in pictures:
        context = browser.new_context(
            storage_state=session, viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
        )  # fmt: skip
        page = context.new_page()
        page.goto(f"{url}{route}")
        page.wait_for_selector(selector, timeout=60_000)
        _settle(page)
        path = HERE / f"page-{name}.png"
        page.screenshot(path=path)
        size = path.stat().st_size
        print(f"{path.name} {size} bytes")
        if size > LARGEST:
            raise SystemExit(f"{path} is larger than {LARGEST} bytes")
        context.close()


def _settle(page: Page) -> None:
    """Until nothing has been fetched for a second; live updates come by streams, which do not count."""
    seen = -1
    while (fetched := page.evaluate("performance.getEntriesByType('resource').length")) != seen:
        seen = fetched
        page.wait_for_timeout(1000)


# ---- real runs


@contextmanager
def _real_runs(folder: Path, home: Path) -> Iterator[None]:
    """A run whose worker is killed twice, and which goes on; one that learns more slowly, and was stopped; one that has
    succeeded, and one that fails."""
    environment = {**os.environ, "PACELINE_HOME": str(home)}
    train = (EXAMPLE / "train.py").read_text()
    assert PROGRESS in train

    def paceline(*arguments: str) -> str:
        command = [sys.executable, "-m", "paceline.cli", *arguments]
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def start(name: str, program: str, *settings: str, job: dict[str, Any] = JOB) -> None:
        code = folder / name
        code.mkdir()
        (code / "train.py").write_text(program)
        (code / "evaluate.py").write_text(EVALUATE)
        (code / "job.yaml").write_text(json.dumps(job))
        paceline("run", str(code / "job.yaml"), "--detach", "--run", name, *settings)

    def wait(name: str, condition: str) -> None:
        paceline("wait", name, "--for", condition, "--timeout", "10m")

    def status(name: str) -> dict[str, Any]:
        return dict(json.loads(paceline("status", name, "-o", "json")))

    broken = {"name": "broken", "framework": "none", "command": ["python", "train.py"]}
    start("broken-7d78", BROKEN, job=broken)
    slow = train.replace("lr=2e-3", "lr=1e-4").replace(PROGRESS, PRINTED)
    start("digits-a07e", slow)
    wait("digits-a07e", "step=400")
    paceline("stop", "digits-a07e")
    command = 'roles.worker.command=["python", "train.py", "--epochs", "2"]'
    start("digits-1823", train.replace(PROGRESS, PRINTED), "--set", command)
    start("digits-3f9a", train.replace(PROGRESS, PRINTED))
    try:
        for step, worker in ((300, "worker-1"), (700, "worker-0")):
            wait("digits-3f9a", f"step={step}")
            _kill_task(lambda: status("digits-3f9a"), worker)
        wait("digits-3f9a", "step=900")
        wait("digits-1823", "ended")
        yield
    finally:
        paceline("stop", "digits-3f9a", "--now")


def _kill_task(status: Callable[[], dict[str, Any]], name: str) -> None:
    def pids() -> list[int]:
        return [task["pid"] for task in status()["tasks"] if task["task"] == name and task["pid"]]

    [pid] = eventually(f"{name} runs", pids)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
