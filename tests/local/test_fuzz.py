"""Random data for every listener and every channel of a task, beside usual traffic: the run does not notice.

See support/fuzz.py for the seed and for longer runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from paceline import plan as plans
from paceline.agent.net.frames import Decoder, Message, encode
from paceline.agent.net.stop_request import ask_to_stop
from paceline.agent.net.tls import BOARD_NAME, SERVER_NAME, context
from paceline.agent.options import Options
from paceline.agent.tensorboard import pod_agent
from paceline.agent.tensorboard.file_sender import FileSender
from paceline.agent.tensorboard.pod_agent import TensorBoardPod
from paceline.backends import certificates
from paceline.storage.stores import peer_client
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_access import MemberAccess
from paceline.storage.stores.peer_client import over_tls
from paceline.storage.stores.peer_server import Server
from support import fuzz, recorded, runs, wire_examples
from support.metrics_text import ask, parse, value
from support.page_server import memory, page_server
from support.ports import free_port
from support.runs import eventually

SHORT = pytest.param(1.0, id="short")
LONG = pytest.param(6.0, id="long", marks=pytest.mark.long)
pytestmark = pytest.mark.timeout(fuzz.seconds(6) + 400)
either = pytest.mark.parametrize("usual", [SHORT, LONG])

RUN = "fuzz-0000"
HOSTS = [f"worker-host-{number}" for number in range(4)]  # the third sends nonsense, the last never joins
AGENT = runs.SOURCE / "paceline" / "agent" / "__main__.py"


def make_plan() -> plans.Plan:
    role = plans.Role("worker", ("true",), {}, plans.GROUP, True, True)
    hosts = tuple(plans.Host(name, "worker", i, 0, 0, None, None, (f"worker-{i}",)) for i, name in enumerate(HOSTS))
    tasks = tuple(plans.Task(f"worker-{i}", "worker", i, name, 0, i) for i, name in enumerate(HOSTS))
    return plans.Plan(
        plans.VERSION, "fuzz", "none", "", "/", (role,), hosts, tasks, plans.Restart(10, None, False),
        plans.Limits(1e6, None, 5), kubernetes={"image": "a/b"},
    )  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> Options:
    certificates.make(tmp_path / "tls")
    (tmp_path / "plan.json").write_text(plans.to_json(make_plan()))
    paths = (str(tmp_path / "plan.json"), str(tmp_path), str(tmp_path / "tls"))
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("captain", "metrics")}
    return Options(RUN, "captain", *paths, **addresses, interpreter=sys.executable, lease=30.0)


def dial(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), 10)
    except OSError:
        return None


# ---- the captain


def join(host: str) -> Message:
    task = host.replace("-host", "")
    return {
        "type": "join", "protocol": 1, "run": RUN, "host": host, "instance": f"{host}-1", "agent": 1, "replaces": True,
        "place": "", "generation": 0, "running": {}, "exits": [], "held": [], "offers": {task: "127.0.0.1:20001"},
    }  # fmt: skip


TO_CAPTAIN: tuple[Message, ...] = (
    {**join(HOSTS[2]), "run": "other-0000"},
    *wire_examples.from_members("worker-2"),
    *wire_examples.FROM_USERS,
)


def scrape(port: int) -> None:
    """A connection may be closed to make room for those of an attacker; then Prometheus, too, tries again."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            head, body = ask(port)
            if body:
                assert head.startswith("HTTP/1.1 200 OK") and value(parse(body), "paceline_host_up", host=HOSTS[0]) == 1
                return
    raise AssertionError("no metrics")


class Member:
    """A member that sends heartbeats and nothing else."""

    def __init__(self, port: int, tls: str, host: str) -> None:
        sock = eventually("the captain listens", lambda: dial(port))
        assert sock is not None
        self._link = context(tls, "member", server=False).wrap_socket(sock, server_hostname=SERVER_NAME)
        self._link.settimeout(60)
        self._decoder = Decoder()
        self._inbox: list[Message] = []
        self._beats = 0
        self._link.sendall(encode(join(host)))
        self.read("welcome")

    def read(self, kind: str) -> Message:
        while True:
            while self._inbox:
                if (message := self._inbox.pop(0))["type"] == kind:
                    return message
            data = self._link.recv(65536)
            assert data, f"the captain closed the connection of a member before {kind}"
            self._inbox += self._decoder.feed(data)

    def beat(self) -> None:
        self._beats += 1
        self._link.sendall(encode({"type": "beat", "n": self._beats, "tasks": {}}))
        assert self.read("beat")["n"] == self._beats

    def leave(self) -> None:
        self.read("finish")
        self._link.sendall(encode({"type": "left"}))
        self._link.close()


@either
def test_a_captain(options: Options, tmp_path: Path, usual: float) -> None:
    log = tmp_path / "agents.log"
    with log.open("wb") as file:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(AGENT), options.to_json()], stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, env={**os.environ, "PACELINE_HOME": str(tmp_path)},
        )  # fmt: skip
    attackers = []
    try:
        port = int(options.captain.rpartition(":")[2])
        members = [Member(port, options.tls, host) for host in HOSTS[:2]]
        [captain] = psutil.Process(keeper.pid).children()
        tls = context(options.tls, "member", server=False)
        for number in range(2):
            nonsense = (join(HOSTS[2]),)
            attacker = fuzz.Attacker(fuzz.SEED + number, port, tls, SERVER_NAME, nonsense, TO_CAPTAIN)
            attackers.append(attacker)
        metrics_port = int(options.metrics.rpartition(":")[2])
        attackers.append(fuzz.HttpAttacker(fuzz.SEED, metrics_port, tls, SERVER_NAME, (), ()))

        def work() -> None:
            for member in members:
                member.beat()
            scrape(metrics_port)

        try:
            fuzz.attack(fuzz.seconds(usual), attackers, work)
        except (AssertionError, OSError) as error:
            raise AssertionError(f"seed {fuzz.SEED}: {error}\n{log.read_text()[-3000:]}") from None
        with Member(port, options.tls, HOSTS[0])._link:  # members can still join
            assert captain.is_running(), log.read_text()
            assert ask_to_stop(options.captain, options.tls, "member", "the test is over")
        members[1].leave()
        keeper.wait(60)
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["status"] == "stopped" and "Traceback" not in log.read_text()
    finally:
        for attacker in attackers:
            attacker.stop()
        keeper.kill()
        keeper.wait(10)
        for process in runs.processes(tmp_path):
            runs.kill(process.pid)


# ---- TensorBoard's pod


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the signal handlers that an agent's loop replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


EVENTS = "train/events.out.tfevents.1"
TO_TENSORBOARD: tuple[Message, ...] = (
    {"type": "hello", "protocol": 1, "run": RUN, "host": HOSTS[1]},
    {"type": "hold", "files": [EVENTS, "x" * 300, "a/../b"]},
    {"type": "begun", "after": [[2, 5, 9], [3, 5, 9]]},
    {"type": "part", "path": EVENTS, "at": 0, "anew": False, "data": "aGVsbG8="},
    {"type": "part", "path": f"{EVENTS}/below", "at": 0, "anew": True, "data": "aGVsbG8="},
)


@either
def test_the_pod_of_tensorboard(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None, usual: float
) -> None:
    monkeypatch.setattr(pod_agent, "with_tensorboard", lambda names: "")
    address = options.captain
    board = TensorBoardPod(Options(RUN, "tensorboard", options.plan, options.folder, options.tls, "", listen=address))
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            while board.loop._running:
                board.loop.once(0.02)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    (tmp_path / "member" / "tensorboard" / "train").mkdir(parents=True)
    member = FileSender(
        Options(RUN, HOSTS[0], options.plan, str(tmp_path / "member"), options.tls, "", tensorboard=address), warns=True
    )
    tls = context(options.tls, "member", server=False)
    port = int(address.rpartition(":")[2])
    hello = ({"type": "hello", "protocol": 1, "run": RUN, "host": HOSTS[1]},)
    attackers = [fuzz.Attacker(fuzz.SEED + number, port, tls, BOARD_NAME, hello, TO_TENSORBOARD) for number in range(2)]
    sent = b""

    def work() -> None:
        nonlocal sent
        with (tmp_path / "member" / "tensorboard" / EVENTS).open("ab") as file:
            file.write(b"more ")
        sent += b"more "
        member.sweep()
        assert (tmp_path / "tensorboard" / "hosts" / HOSTS[0] / EVENTS).read_bytes() == sent

    try:
        fuzz.attack(fuzz.seconds(usual), attackers, work)
    except (AssertionError, OSError) as error:
        raise AssertionError(f"seed {fuzz.SEED}: {error!r} {failures!r}") from None
    finally:
        board.loop.stop()
        thread.join()
        member._disconnect()
        board._listener.close()
        for peer in list(board._peers):
            board.drop(peer)
    assert not failures


# ---- the store that a captain serves


PART = f"{RUN}/step-10-g1/worker-0"
TO_STORE: tuple[Message, ...] = tuple(
    {"do": verb, "name": name}
    for verb in sorted({*peer_client._OPERATIONS, "read", "delete", "clear"})
    for name in (f"{PART}/x", f"{RUN}/generations/00000099.json", f"{RUN}/step-10-g1/manifest.json", f"{RUN}/../x", RUN)
)


@either
def test_a_store_of_a_captain(options: Options, tmp_path: Path, usual: float) -> None:
    folder = FolderStore(str(tmp_path / "store"))
    folder.create(f"{RUN}/generations/00000001.json", b"the record")
    access = MemberAccess(RUN, has=folder.has)
    server = Server(("127.0.0.1", 0), context(options.tls, "captain", server=True), folder, access)
    tls: ssl.SSLContext = context(options.tls, "member", server=False)
    peer = over_tls(("127.0.0.1", server.port), tls, SERVER_NAME)
    attackers = [fuzz.Attacker(fuzz.SEED + number, server.port, tls, SERVER_NAME, (), TO_STORE) for number in range(2)]
    (tmp_path / "part").write_bytes(os.urandom(100_000))

    def work() -> None:
        peer.send(str(tmp_path / "part"), f"{PART}/good", lambda _: True)
        peer.fetch(f"{PART}/good", str(tmp_path / "fetched"), lambda _: True)
        assert (tmp_path / "fetched").read_bytes() == (tmp_path / "part").read_bytes()
        (tmp_path / "fetched").unlink()

    try:
        fuzz.attack(fuzz.seconds(usual), attackers, work)
    finally:
        peer.close()
        server.close()
    paths = sorted(str(path.relative_to(tmp_path / "store")) for path in (tmp_path / "store").rglob("*"))
    files = [path for path in paths if (tmp_path / "store" / path).is_file() and not path.endswith(".partial")]
    assert set(files) <= {f"{RUN}/generations/00000001.json", f"{PART}/good", f"{PART}/x"}


# ---- tasks


@pytest.mark.parametrize("watch", ["", pytest.param("checkpoints", marks=pytest.mark.long)])
@either
def test_a_task(tmp_path: Path, usual: float, watch: str) -> None:
    """It writes random data to all its descriptors and folders: neither its agent nor the captain restarts."""
    limit = fuzz.seconds(usual)
    script = str(runs.PROGRAMS / "fuzz_channels.py")
    program = [sys.executable, script, str(limit), str(fuzz.SEED), *filter(None, [watch])]
    with runs.starter(tmp_path) as start:
        run = start(runs.job(program, workers=1, **({"snapshots": {"watch": watch}} if watch else {})))
        report = run.succeeds(limit + runs.LIMIT_S)
        assert report["restarts"] == [] and report["steps"] == 1_000_000
        assert len(run.events("member-joined")) == 1, run.story()
        assert not run.events("captain-returned", "member-lost"), run.story()
        assert "Traceback" not in (run.folder / "agents.log").read_text()
        for line in (run.folder / "events.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


# ---- the page


@either
def test_the_page(tmp_path: Path, usual: float) -> None:
    """Strangers, and a browser that sends nonsense: other browsers get answers, and no request shows a bug."""
    line = f"{recorded.at(1)} g1 | hello\n"
    run = recorded.write(tmp_path, report=recorded.REPORT, logs={"worker-0": line * 1000}).name
    with page_server(tmp_path) as server, server.client() as client:
        attackers = []
        for number, session in enumerate(("", "; ".join(map("=".join, client.cookies.items())))):
            attacker = fuzz.PageAttacker(fuzz.SEED + number, server.port, ssl.create_default_context(), "x", (), ())
            attacker.session, attacker.run = session, run
            attackers.append(attacker)
        before = memory(server.process.pid)

        def work() -> None:
            for _ in range(20):  # a connection may be closed to make room for those of an attacker
                with contextlib.suppress(httpx2.HTTPError):
                    response = client.get(f"api/runs/{run}")
                    if response.status_code != 503:
                        assert response.json()["status"] == "succeeded", response.text
                        return
            raise AssertionError(f"seed {fuzz.SEED}: no answer\n{server.said()[-3000:]}")

        fuzz.attack(fuzz.seconds(usual), attackers, work)
        assert server.process.poll() is None and server.said() == "press Ctrl-C to quit\n", f"seed {fuzz.SEED}"
        assert memory(server.process.pid) - before < 300 << 20
