"""What the backend tells an agent about its host: one JSON object on the command line, without secrets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LEASE = 10.0
FAILED = 64  # exit code of a captain whose run has failed
PAGE_PORT = 6006  # of TensorBoard, on the loopback address of its pod alone: people come by a forwarded port
LEAVING = 75  # exit code of a host that was told to go: the backend may replace it
SAVING_SHARE = 0.7  # of the grace: for a last snapshot of the group; the rest is for tasks to end


@dataclass(frozen=True)
class Options:
    run: str
    host: str  # a host of the plan, or "captain"
    plan: str  # path of plan.json
    folder: str  # where events, logs, snapshots go
    tls: str  # folder of certificates
    captain: str  # host:port that members dial and the captain listens on
    address: str = "127.0.0.1"  # how other hosts reach this one
    listen: str = ""  # address to listen on, where it differs from the one that is dialled
    work: str = ""  # working folder of tasks; empty: as the plan says
    library: str = ""  # where tasks find `import paceline`, should their interpreter not have it
    interpreter: str = ""  # what `python` in a command means; empty: the agent's own
    cores: float = 1.0
    devices: tuple[str, ...] = ()  # GPUs of this host
    replaces: bool = False  # no earlier instance of this host can be running
    place: str = ""  # where the host is: of two instances in the same place, the earlier is gone; empty: not known
    lease: float = LEASE
    echo: bool = False  # output and events also go to stdout, where the backend's own logs take them from
    last_words: str = ""  # a file for how the run ended, where the backend has one
    tensorboard: str = ""  # host:port that takes what tasks write for TensorBoard, where something does
    snapshots: str = ""  # the place for them, where it is not as the plan says
    origin: str = ""  # what the run starts from, where it is not as the plan says
    ingest: str = ""  # the place for the data that the job makes, where it is not as the plan says
    serve: str = ""  # host:port that other hosts may use that place at, or get the library for buckets from
    obstore: str = ""  # where that library comes from, if this interpreter has none: an archive, or peer://host:port
    token: str = ""  # of the captain: tells this run from any other of its id, however often it is started again
    starter: int = 0  # the process that must live as long as this host; 0: whoever its parent is

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def parse(text: str) -> Options:
    data = json.loads(text)
    return Options(**{**data, "devices": tuple(data.get("devices", ()))})


def endpoint(address: str) -> tuple[str, int]:
    """
    >>> endpoint("127.0.0.1:2222")
    ('127.0.0.1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
