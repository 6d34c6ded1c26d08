"""A real Prometheus reads the metrics of a real run, and its own tool checks them, the rules and some alerts."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import runs
from support.lab.components import prometheus
from support.metrics_text import ask, parse, value
from support.ports import free_port
from support.runs import eventually

ALERTS = Path(__file__).parents[2] / "docs" / "metrics" / "alerts.yaml"
PROGRAM = """
import time
import paceline
from pathlib import Path
step = 0
while not Path({done!r}).exists():
    step += 1
    paceline.report(step=step, loss=1 / step, **{{'quo"ted\\n': 2.0}})
    time.sleep(0.05)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[runs.Run, Callable[[], None]]]:
    """A run with metrics that ends when the function is called."""
    done = tmp_path / "done"
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(done=str(done)))
    with runs.starter(tmp_path) as start:
        yield start(runs.job(["python", str(program)], workers=2, metrics=True)), done.touch


def url_of(run: runs.Run) -> str:
    return str(json.loads((run.folder / "run.json").read_text())["metrics_url"])


def port_of(url: str) -> int:
    return int(re.findall(r":(\d+)/", url)[0])


def scraped(url: str) -> dict[Any, float]:
    with contextlib.suppress(OSError):
        return parse(ask(port_of(url))[1])
    return {}


def test_a_run_serves_its_metrics_on_loopback_and_survives_its_captain(
    run: tuple[runs.Run, Callable[[], None]],
) -> None:
    running, finish = run
    url = eventually("run.json", lambda: (running.folder / "run.json").exists() and url_of(running))
    assert url.startswith("http://127.0.0.1:")
    eventually("steps", lambda: (value(scraped(url), "paceline_task_step", task="worker-1") or 0) > 3)
    assert url in running.call("status").stdout
    runs.kill(running.agent("captain"))
    running.wait("captain-returned")
    again = eventually("the next captain serves them, too", lambda: scraped(url))
    assert value(again, "paceline_generation") == 1
    reported = {dict(labels)["name"] for name, labels in again if name == "paceline_reported"}
    assert reported <= {"loss", r"quo\"ted\n"}
    finish()
    running.succeeds()


@pytest.mark.long  # needs a package of Debian
def test_prometheus_reads_a_run(run: tuple[runs.Run, Callable[[], None]], tmp_path: Path) -> None:
    running, finish = run
    url = eventually("run.json", lambda: (running.folder / "run.json").exists() and url_of(running))
    eventually("steps", lambda: value(scraped(url), "paceline_step"))
    for text in (ask(port_of(url))[1], running.call("metrics").stdout):
        checked = promtool("check", "metrics", stdin=text)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    with served(running) as own:
        targets = [f"127.0.0.1:{port_of(each)}" for each in (url, own)]
        with Prometheus(tmp_path / "prometheus", targets) as server:
            eventually("both targets are read", lambda: sum(value for _, value in server.query("up")) == 2)
            info = eventually("the run is known", lambda: server.query("paceline_run_info"))
            assert {labels["instance"] for labels, _ in info} == set(targets)
            first = server.query("min(paceline_step)")[0][1]
            eventually("steps are read again", lambda: server.query("min(paceline_step)")[0][1] > first)
            assert {labels["name"] for labels, _ in server.query("paceline_reported")} == {"loss", 'quo"ted\n'}
            assert server.type_of("paceline_restarts") == "counter"
    finish()
    running.succeeds()


@pytest.mark.long  # needs a package of Debian
def test_the_alert_rules(tmp_path: Path) -> None:
    checked = promtool("check", "rules", str(ALERTS))
    assert checked.returncode == 0 and "6 rules found" in checked.stdout, checked.stdout + checked.stderr
    run, minute = 'run="r", instance="a:1", job="paceline"', 60
    series = [
        (f"paceline_progress_age_seconds{{{run}}}", "0x9 0+60x60"),
        (f'paceline_restarts_total{{{run}, cause="hang"}}', "0x9 0+1x8 8x50"),
        (f"paceline_disk_free_bytes{{{run}}}", "50x29 5x30"),
        (f"paceline_disk_size_bytes{{{run}}}", "100x60"),
        (f"paceline_goodput_ratio{{{run}}}", "0.5x120"),
        (f"paceline_run_start_time_seconds{{{run}}}", "0x120"),
        (f'paceline_snapshot_age_seconds{{{run}, state="committed"}}', "0+60x200"),
        (f"paceline_run_info{{{run}}}", "1x20 _x100"),
        ('up{instance="a:1", job="paceline"}', "1x20 0x100"),
        ('up{instance="b:1", job="other"}', "0x120"),
    ]
    firing = {
        "PacelineNoProgress": (30, 46), "PacelineRestarts": (10, 20), "PacelineDiskFull": (20, 36),
        "PacelineGoodputLow": (60, 80), "PacelineSnapshotTooOld": (110, 130), "PacelineCaptainDown": (20, 24),
    }  # fmt: skip
    own = {"instance": "a:1", "job": "paceline"}
    labels = {
        "PacelineRestarts": {"run": "r"}, "PacelineSnapshotTooOld": {"run": "r", "state": "committed", **own},
        "PacelineCaptainDown": own,
    }  # fmt: skip
    rules = {rule[0]: rule[1] for rule in re.findall(r"alert: (\w+).*?severity: (\w+)", ALERTS.read_text(), re.S)}
    tests: list[dict[str, Any]] = []
    for alert, (before, after) in firing.items():
        expected = {"severity": rules[alert], **labels.get(alert, {"run": "r", **own})}
        tests.append({"eval_time": f"{before}m", "alertname": alert, "exp_alerts": []})
        tests.append({"eval_time": f"{after}m", "alertname": alert, "exp_alerts": [{"exp_labels": expected}]})
    document = {
        "rule_files": [str(stripped(tmp_path))],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": f"{minute}s",
                "input_series": [{"series": name, "values": values} for name, values in series],
                "alert_rule_test": tests,
            }
        ],
    }
    (tmp_path / "tests.json").write_text(json.dumps(document))
    tested = promtool("test", "rules", str(tmp_path / "tests.json"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def stripped(folder: Path) -> Path:
    """The rules without their texts, which a test would have to repeat."""
    path = folder / "alerts.yaml"
    path.write_text(re.sub(r"    annotations:\n(      .*\n)+", "", ALERTS.read_text()))
    return path


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([prometheus() / "promtool", *arguments], input=stdin, capture_output=True, text=True)


@contextlib.contextmanager
def served(run: runs.Run) -> Iterator[str]:
    """`paceline metrics --listen`, and its address."""
    command = [sys.executable, "-m", "paceline.cli", "metrics", "--listen", "0"]
    with subprocess.Popen(command, env=run.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
            assert server.wait(60) == 0


class Prometheus:
    """A server that reads these targets each second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        folder.mkdir()
        self._port = free_port()
        self._log = folder / "log"
        config = {
            "global": {"scrape_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        options = {
            "config.file": folder / "prometheus.json", "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self._port}",
        }  # fmt: skip
        command = [str(prometheus() / "prometheus"), *(f"--{name}={option}" for name, option in options.items())]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self) -> Prometheus:
        try:
            eventually("Prometheus answers", lambda: self._get("rules"), more=self._log.read_text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values."""
        answer = self._get(f"query?query={urllib.parse.quote(expression)}") or {"result": []}
        return [(each["metric"], float(each["value"][1])) for each in answer["result"]]

    def type_of(self, metric: str) -> str:
        return str(self._get(f"metadata?metric={metric}")[metric][0]["type"])

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", timeout=20) as response:
                return json.load(response)["data"]
        except OSError:
            return None
