"""The options of an agent: one JSON object on the command line, written by the backend, without secrets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

LEASE = 10.0
NO_CAPTAIN = "cannot find the captain: "  # begins a line that a member prints, after "paceline: "
FAILED = 64  # exit code of a captain whose run has failed
PAGE_PORT = 6006  # TensorBoard's port, only on the loopback address of its pod: users connect through a forwarded port
METRICS_PATH = "/metrics"
LEAVING = 75  # exit code of a host that was asked to shut down: the backend may replace it
SHARED_FOLDER = "folder"  # `peers` of hosts that see each other's folders
SAVING_SHARE = 0.7  # fraction of limits.grace for a last snapshot of the group; the rest is for tasks to end


@dataclass(frozen=True)
class Options:
    run: str
    host: str  # a host of the plan, or "captain"
    plan: str  # path of plan.json
    folder: str  # folder for events, logs and snapshots
    tls: str  # folder of certificates
    captain: str  # host:port that members dial and the captain listens on
    address: str = "127.0.0.1"  # address that other hosts use to reach this one
    listen: str = ""  # address to listen on, if it differs from the one that members dial
    work: str = ""  # working folder of tasks; empty: the plan's
    library: str = ""  # added to PYTHONPATH, so that tasks can `import paceline`
    interpreter: str = ""  # used for `python` in a command; empty: the agent's own
    cores: float = 1.0
    devices: tuple[str, ...] = ()  # GPUs of this host
    machine: dict[str, tuple[str, ...]] = field(default_factory=dict)  # hosts on it -> GPUs; {}: only this host
    replaces: bool = False  # no earlier instance of this host can be running
    place: str = ""  # uid of the pod: of two instances with the same uid, the earlier has ended; empty: unknown
    lease: float = LEASE
    echo: bool = False  # also write output and events to stdout, for the backend's own logs
    last_words: str = ""  # file for the termination message, if the backend reads one
    tensorboard: str = ""  # host:port that receives the event files of tasks; empty: none
    snapshots: str = ""  # location of snapshots; empty: the plan's
    origin: str = ""  # snapshot that the run starts from; empty: the plan's
    ingest: str = ""  # location of ingested data; empty: the plan's
    peers: str = ""  # how other hosts get its snapshots: SHARED_FOLDER, or an address; empty: not at all
    metrics: str = ""  # captain only: host:port that serves metrics; empty: none
    serve: str = ""  # host:port that serves the store and the library for buckets (captain), or its parts (member)
    obstore: str = ""  # source of the library for buckets, if it is not installed: an archive, or peer://host:port
    token: str = ""  # captain only: distinguishes runs with the same id; a restart does not change it
    memory: str = ""  # folder in memory that tasks may save snapshots to; empty: none
    compiled: str = ""  # folder for what frameworks compile; empty: it is not kept
    starter: int = 0  # the host ends when this process does; 0: its parent

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def parse(text: str) -> Options:
    data = json.loads(text)
    machine = {host: tuple(devices) for host, devices in data.get("machine", {}).items()}
    return Options(**{**data, "devices": tuple(data.get("devices", ())), "machine": machine})


def endpoint(address: str) -> tuple[str, int]:
    """
    >>> endpoint("127.0.0.1:2222")
    ('127.0.0.1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
