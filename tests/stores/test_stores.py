"""Every kind of store does what snapshots need, faults are real, and nothing is left behind."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import psutil
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from support.stores.faults import Toxiproxy
from support.stores.parts import TESTS
from support.stores.servers import Store
from support.stores.serving import HOST, Port

pytestmark = pytest.mark.xdist_group("stores")  # one set of servers is enough

MIB = 1 << 20
SOON_S = 60.0  # for killed processes to end, and for a busy machine to be quick enough


def open_store(store: Store, **client: Any) -> Any:
    """With obstore, which does not retry here."""
    return obstore.store.from_url(
        store.url, config=store.config, client_options={"allow_http": True, **client}, retry_config={"max_retries": 0}
    )


def eventually(description: str, check: Callable[[], bool], limit: float = SOON_S) -> None:
    until = time.monotonic() + limit
    while not check():
        assert time.monotonic() < until, f"not within {limit:g} s: {description}"
        time.sleep(0.05)


# ---- the same for all


def test_an_object_that_was_put_can_be_read(store: Store) -> None:
    client = open_store(store)
    name = "a folder/näme+1&2=3"
    obstore.put(client, name, b"one")
    obstore.put(client, name, b"two")
    assert obstore.get(client, name).bytes() == b"two"
    assert obstore.head(client, name)["size"] == 3
    assert [each["path"] for each in obstore.list(client).collect()] == [name]


def test_an_existing_name_cannot_be_created(store: Store) -> None:
    client = open_store(store)
    obstore.put(client, "name", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(client, "name", b"second", mode="create")
    assert obstore.get(client, "name").bytes() == b"first"


def test_only_one_of_many_concurrent_creates_succeeds(store: Store) -> None:
    client = open_store(store)
    count = 16
    together = threading.Barrier(count)

    def create(number: int, name: str) -> int | None:
        together.wait(120)
        try:
            obstore.put(client, name, f"{number}".encode() * 1000, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return None
        return number

    with ThreadPoolExecutor(count) as pool:
        for repetition in range(5):
            name = f"name-{repetition}"
            created = [number for number in pool.map(create, range(count), [name] * count) if number is not None]
            assert len(created) == 1
            assert obstore.get(client, name).bytes() == f"{created[0]}".encode() * 1000


def test_an_object_uploaded_in_parts_is_read_as_a_whole(store: Store) -> None:
    client = open_store(store)
    data = os.urandom(20 * MIB)
    obstore.put(client, "whole", data, use_multipart=True, chunk_size=5 * MIB)
    digest = hashlib.sha256()
    for piece in obstore.get(client, "whole").stream():
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(data).digest()


def test_parts_of_an_aborted_upload_are_not_visible(store: Store) -> None:
    client = open_store(store)

    def pieces() -> Iterator[bytes]:
        yield bytes(12 * MIB)
        raise RuntimeError("given up")

    # A server that is told to discard parts while one still arrives may answer with an error of its own.
    with pytest.raises(Exception, match=r"given up|Error performing DELETE"):
        obstore.put(client, "whole", pieces(), use_multipart=True, chunk_size=5 * MIB)
    assert list(obstore.list(client).collect()) == []


def test_a_range_is_a_part_of_an_object(store: Store) -> None:
    client = open_store(store)
    obstore.put(client, "letters", b"abcdefghij")
    assert bytes(obstore.get_range(client, "letters", start=2, end=5)) == b"cde"
    ranges = obstore.get_ranges(client, "letters", starts=[0, 8], ends=[1, 10])
    assert [bytes(each) for each in ranges] == [b"a", b"ij"]


def test_a_list_contains_the_names_below_a_prefix(store: Store) -> None:
    client = open_store(store)
    for name in ("runs/1/a", "runs/1/b", "runs/10", "other"):
        obstore.put(client, name, b"")
    assert sorted(each["path"] for each in obstore.list(client, "runs/1").collect()) == ["runs/1/a", "runs/1/b"]
    listing = obstore.list_with_delimiter(client, "runs")
    assert listing["common_prefixes"] == ["runs/1"]
    assert [each["path"] for each in listing["objects"]] == ["runs/10"]


def test_a_list_of_more_than_a_page_is_complete(store: Store) -> None:
    client = open_store(store)
    names = {f"many/{number:04}" for number in range(1100)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: obstore.put(client, name, b"", use_multipart=False), names))
    assert {each["path"] for each in obstore.list(client, "many").collect()} == names


def test_a_deleted_object_is_gone(store: Store) -> None:
    client = open_store(store)
    obstore.put(client, "name", b"")
    obstore.delete(client, "name")
    with pytest.raises(FileNotFoundError):
        obstore.get(client, "name")
    assert list(obstore.list(client).collect()) == []


def test_a_missing_bucket_is_an_error(store: Store) -> None:
    missing = open_store(store.bucket("nonesuch"))
    with pytest.raises(FileNotFoundError):
        obstore.put(missing, "name", b"")
    with pytest.raises((FileNotFoundError, GenericError), match=r"nonesuch|NoSuchBucket|ContainerNotFound"):
        obstore.list(missing).collect()


def test_wrong_credentials_permit_nothing(store: Store) -> None:
    obstore.put(open_store(store), "name", b"")
    stranger = open_store(store.stranger())
    with pytest.raises((PermissionDeniedError, UnauthenticatedError)):
        obstore.put(stranger, "other", b"")
    with pytest.raises((PermissionDeniedError, UnauthenticatedError)):
        obstore.get(stranger, "name")


def test_the_options_are_environment_variables(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.options.items():
        monkeypatch.setenv(name, value)
    client = obstore.store.from_url(store.url)
    obstore.put(client, "name", b"1")
    assert obstore.get(open_store(store), "name").bytes() == b"1"


def test_objects_survive_a_restart(store: Store) -> None:
    client = open_store(store)
    obstore.put(client, "name", b"1")
    store.stop()
    with pytest.raises(BaseError):
        obstore.get(client, "name")
    store.start()
    assert obstore.get(client, "name").bytes() == b"1"


# ---- the stand-in for Google


def test_google_a_missing_object_cannot_be_deleted(gcs: Store) -> None:
    with pytest.raises(FileNotFoundError):
        obstore.delete(open_store(gcs), "name")


def test_google_a_copy_does_not_overwrite_an_existing_name(gcs: Store) -> None:
    client = open_store(gcs)
    obstore.put(client, "a", b"a", attributes={"Content-Type": "text/plain", "made-by": "a test"})
    obstore.copy(client, "a", "b")
    copy = obstore.get(client, "b")
    assert copy.bytes() == b"a"
    assert copy.attributes == {"Content-Type": "text/plain", "made-by": "a test"}
    obstore.put(client, "a", b"other")
    with pytest.raises(AlreadyExistsError):
        obstore.copy(client, "a", "b", overwrite=False)
    assert obstore.get(client, "b").bytes() == b"a"


def test_google_a_write_that_expects_an_older_generation_does_not_overwrite_the_newer(gcs: Store) -> None:
    client = open_store(gcs)
    first = obstore.put(client, "name", b"1", use_multipart=False)
    second = obstore.put(client, "name", b"2", mode=first, use_multipart=False)
    assert second["version"] == obstore.head(client, "name")["version"] != first["version"]
    with pytest.raises(BaseError, match=r"PreconditionFailed|412"):
        obstore.put(client, "name", b"3", mode=first, use_multipart=False)
    assert obstore.get(client, "name").bytes() == b"2"


# ---- faults


def seconds_for(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_a_link_may_be_slow(store: Store, toxiproxy: Toxiproxy) -> None:
    link = toxiproxy.link(store.port)
    far = open_store(store.through(link))
    obstore.put(far, "name", b"1")
    with link.latency(0.5):
        assert seconds_for(lambda: obstore.get(far, "name").bytes()) >= 0.5
    eventually("it is as fast as before", lambda: seconds_for(lambda: obstore.get(far, "name").bytes()) < 0.5)


def test_a_link_may_be_narrow(store: Store, toxiproxy: Toxiproxy) -> None:
    link = toxiproxy.link(store.port)
    far = open_store(store.through(link))
    with link.bandwidth(1_000_000, "upstream"):
        assert seconds_for(lambda: obstore.put(far, "name", bytes(1_000_000))) >= 0.8
    with link.bandwidth(1_000_000):
        assert seconds_for(lambda: obstore.get(far, "name").bytes()) >= 0.8
    eventually("it is as wide as before", lambda: seconds_for(lambda: obstore.get(far, "name").bytes()) < 0.8)


def test_a_link_may_be_cut_in_the_middle_of_an_upload_and_nothing_is_visible(
    store: Store, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(store.port)
    far = open_store(store.through(link))
    with link.cut(100_000, "upstream"), pytest.raises(BaseError):
        obstore.put(far, "name", bytes(MIB), use_multipart=False)
    with pytest.raises(FileNotFoundError):
        obstore.get(open_store(store), "name")
    obstore.put(far, "name", b"1")


def test_a_link_may_be_cut_in_the_middle_of_a_download(store: Store, toxiproxy: Toxiproxy) -> None:
    obstore.put(open_store(store), "name", bytes(MIB))
    link = toxiproxy.link(store.port)
    far = open_store(store.through(link))
    with link.cut(100_000), pytest.raises(BaseError):
        obstore.get(far, "name").bytes()


def test_a_link_may_reset_connections(store: Store, toxiproxy: Toxiproxy) -> None:
    link = toxiproxy.link(store.port)
    far = open_store(store.through(link))
    with link.reset(), pytest.raises(BaseError):
        obstore.put(far, "name", b"1")
    obstore.put(far, "name", b"1")


def test_a_link_may_be_silent(store: Store, toxiproxy: Toxiproxy) -> None:
    link = toxiproxy.link(store.port)
    with link.silence(), pytest.raises(BaseError, match=r"timed out|timeout"):
        obstore.put(open_store(store.through(link), timeout="1s"), "name", b"1")
    obstore.put(open_store(store.through(link)), "name", b"1")


def test_a_link_may_be_down_and_up_again(store: Store, toxiproxy: Toxiproxy) -> None:
    link = toxiproxy.link(store.port)
    far = open_store(store.through(link))
    obstore.put(far, "name", b"1")
    with link.down(), pytest.raises(BaseError):
        obstore.get(far, "name")
    assert obstore.get(far, "name").bytes() == b"1"


# ---- nothing is left

PROGRAM = """
import signal, sys, time
from contextlib import ExitStack
from pathlib import Path
from support.stores import faults, servers

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
with ExitStack() as stack:
    for start in (servers.s3, servers.gcs, servers.azure, faults.toxiproxy):
        folder = Path(sys.argv[1]) / start.__name__
        folder.mkdir()
        stack.enter_context(start(folder))
    print("up", flush=True)
    time.sleep(600)
"""
STARTED = 5  # programs: a gateway for S3 and one for Google, the translator, azurite, toxiproxy


@pytest.fixture
def others(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with servers of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout and process.stderr
            assert process.stdout.readline() == "up\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_the_servers_when_the_tests_end(
    others: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    processes = psutil.Process(others.pid).children(recursive=True)
    assert len(processes) == 2 * STARTED  # each with its keeper
    assert len(list(tmp_path.iterdir())) == 4
    others.send_signal(number)
    eventually("no process is left", lambda: not any(map(runs, processes)))
    eventually("no folder is left", lambda: not list(tmp_path.iterdir()))


def test_a_server_does_not_outlive_its_keeper(others: subprocess.Popen[str]) -> None:
    keepers = psutil.Process(others.pid).children()
    processes = psutil.Process(others.pid).children(recursive=True)
    for keeper in keepers:
        keeper.kill()
    servers = [each for each in processes if each not in keepers]
    assert len(servers) == STARTED
    eventually("no server is left", lambda: not any(map(runs, servers)))


def test_a_port_stays_reserved_for_our_server_while_it_is_down() -> None:
    port = Port()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((HOST, port.number))
    socket.create_server((HOST, port.number)).close()  # as servers do it: with SO_REUSEADDR
    port.close()


def test_a_server_outlives_the_thread_that_started_it(s3: Store) -> None:
    s3.stop()
    thread = threading.Thread(target=s3.start)
    thread.start()
    thread.join()
    obstore.put(open_store(s3), "name", b"")
