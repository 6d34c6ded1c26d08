"""A member's connection to the captain: dialing again, the captain's name, and its absence."""

from __future__ import annotations

import threading

import pytest

from paceline.agent.captain import instructions as ins
from paceline.agent.net import captain_connection as module
from paceline.agent.net import dns
from support.captain_connections import NAME, SOON, WELCOME, Captain, Clock, Host, Names, await_join, join

pytestmark = pytest.mark.timeout(60)


# ---- dialing again


def test_a_captain_that_hangs_up_is_dialed_again_and_gets_the_current_state(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    peer.hang_up()
    host.loop.until(lambda: not host.connection.joined)
    host.generation = 4
    host.connection.notify("in between")
    host.loop.pass_time(0.06)
    again = await_join(host, captain, 1)
    assert again.received[0]["generation"] == 4
    again.send(WELCOME)
    host.loop.until(lambda: len(again.received) > 1)
    assert again.received[1]["text"] == "in between"


def test_a_message_sent_just_before_a_reset_is_received(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    peer.send({"type": "finish", "status": "succeeded", "reason": ""})
    peer.reset()
    host.loop.until(lambda: not host.connection.joined)
    assert host.received == [ins.DismissMember("worker-host-0", "succeeded", "")]


def test_the_delay_between_dials_grows_up_to_a_second(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    clock.waits.clear()
    host.connection.dial()
    for number in range(1, 12):
        clock.until(lambda number=number: len([wait for wait in clock.waits if wait <= 1.0]) == number)
        clock.pass_time(1.0)
    waits = [wait for wait in clock.waits if wait <= 1.0]
    assert waits[:3] == pytest.approx([0.05, 0.075, 0.1125]) and waits[9:11] == [1.0, 1.0]
    assert waits == sorted(waits)


def test_the_delay_starts_over_after_a_welcome(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    host.connection.dial()
    for number in range(1, 6):
        clock.pass_time(1.0)
        clock.until(lambda number=number: len([wait for wait in clock.waits if wait <= 1.0]) == number)
    returned = Captain(captain._tls, clock, captain.port)
    clock.pass_time(1.0)
    peer = await_join(host, returned)
    peer.send(WELCOME)
    clock.until(lambda: host.connection.joined)
    clock.waits.clear()
    peer.hang_up()
    clock.until(lambda: not host.connection.joined)
    assert clock.waits == [0.05]
    returned.close()


def test_a_captain_that_sends_nothing_is_dialed_again(host: Host, captain: Captain, clock: Clock) -> None:
    host.connection.dial()
    first = await_join(host, captain)
    clock.pass_time(module.DIAL_LIMIT - 1.0)
    clock.settle()
    assert not first.close_reason
    clock.pass_time(2.0)
    clock.until(lambda: first.close_reason)
    await_join(host, captain, 1)
    clock.pass_time(5.0)
    assert host.connection.reason_to_leave(10.0).endswith(f"127.0.0.1:{captain.port}: no response for 10 s")


def test_a_captain_that_has_sent_a_welcome_is_not_dialed_again(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    clock.pass_time(10 * module.DIAL_LIMIT)
    clock.settle()
    assert not peer.close_reason and host.connection.joined and len(captain.peers) == 1


def test_a_member_that_has_hung_up_does_not_dial_again(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    host.connection.hang_up()
    clock.until(lambda: peer.close_reason)
    clock.pass_time(100.0)
    clock.settle()
    assert len(captain.peers) == 1 and not host.connection.joined and host.connection.reason_to_leave(1.0) == ""


def test_a_member_that_hangs_up_while_waiting_to_dial_does_not_dial(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    peer.hang_up()
    clock.until(lambda: not host.connection.joined)
    host.connection.hang_up()
    clock.pass_time(100.0)
    clock.settle()
    assert len(captain.peers) == 1


# ---- the captain's name


def test_a_captain_is_dialed_by_its_name(named: Host, names: Names, captain: Captain) -> None:
    join(named, captain)
    assert names.queries == [NAME]


def test_a_name_that_does_not_exist_yet_is_looked_up_again(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    names.port = 0
    named.connection.dial()
    for number in range(1, 4):
        clock.until(lambda number=number: len(clock.waits) == number)
        assert names.queries == [NAME] * number
        clock.pass_time(1.0)
    names.port = captain.port
    clock.until(lambda: len(clock.waits) > 3)
    clock.pass_time(1.0)
    await_join(named, captain)


def test_a_name_server_that_hangs_blocks_nothing(named: Host, names: Names, captain: Captain, clock: Clock) -> None:
    gate = names.block(NAME)
    named.connection.dial()
    clock.until(lambda: names.queries)
    clock.pass_time(20.0)
    named.connection.dial()  # its answer is for this call, too
    named.connection.notify("hello")
    assert names.queries == [NAME] and captain.peers == []
    gate.set()
    await_join(named, captain)
    assert names.queries == [NAME]


def test_a_member_that_hangs_up_during_a_lookup_does_not_dial(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    gate = names.block(NAME)
    named.connection.dial()
    clock.until(lambda: names.queries)
    named.connection.hang_up()
    clock.pass_time(1.0)
    gate.set()
    clock.until(lambda: named.connection._lookup.waiting() == 0.0)
    clock.settle()
    clock.pass_time(100.0)
    clock.settle()
    assert captain.peers == [] and names.queries == [NAME]


@pytest.mark.parametrize("error", [UnicodeError("label empty or too long"), ValueError("embedded null character")])
def test_an_invalid_name_has_no_address(named: Host, names: Names, clock: Clock, error: Exception) -> None:
    names.port, names.error = 0, error
    named.connection.dial()
    clock.until(lambda: clock.waits == [0.05])
    clock.pass_time(10.0)
    clock.until(lambda: len(clock.waits) == 2)
    assert named.connection.reason_to_leave(5.0).endswith(f"(limits.start): {named.address}: the name was not found")


def test_a_lookup_is_retried_if_no_thread_can_be_started(
    named: Host, captain: Captain, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        named.connection.dial()
    clock.pass_time(0.06)
    await_join(named, captain)


# ---- without a captain


def lookup_threads() -> list[threading.Thread]:
    """The threads that look up a name, or check whether any name server answers."""
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_look_up)")]


def test_a_member_without_a_captain_leaves_after_its_limit(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    host.connection.dial()
    clock.until(lambda: clock.waits)
    clock.pass_time(8.0)
    assert host.connection.reason_to_leave(8.0) == ""
    clock.pass_time(0.1)
    clock.settle()
    reason = f"could not reach the captain for 8 s (limits.start): 127.0.0.1:{captain.port}: Connection refused"
    assert host.connection.reason_to_leave(8.0) == reason
    assert host.echo.output == []


def test_a_joined_member_stays_and_its_limit_counts_from_the_disconnection(
    host: Host, captain: Captain, clock: Clock
) -> None:
    peer = join(host, captain)
    clock.pass_time(100.0)
    assert host.connection.reason_to_leave(8.0) == ""
    peer.hang_up()
    captain.close()
    clock.until(lambda: not host.connection.joined)
    clock.pass_time(7.9)
    assert host.connection.reason_to_leave(8.0) == ""
    clock.pass_time(0.2)
    assert host.connection.reason_to_leave(8.0) != ""


def test_a_member_that_waits_for_another_instance_of_its_host_does_not_leave(
    host: Host, captain: Captain, clock: Clock
) -> None:
    host.connection.dial()
    clock.pass_time(7.0)
    peer = await_join(host, captain)
    peer.send({"type": "wait"})
    clock.until(lambda: host.connection._alone_since == clock.time)
    clock.pass_time(2.0)
    assert host.connection.reason_to_leave(8.0) == "" and not host.connection.joined
    peer.send(WELCOME)
    clock.until(lambda: host.connection.joined)


def test_a_name_server_that_does_not_answer_is_reported_once(named: Host, names: Names, clock: Clock) -> None:
    names.is_down()
    named.connection.dial()
    clock.until(lambda: named.connection._lookup.unanswered)
    assert named.connection.reason_to_leave(8.0) == "" and named.echo.output == []
    clock.pass_time(module.UNANSWERED + 0.1)
    assert named.connection.reason_to_leave(8.0) == "" and named.connection.reason_to_leave(8.0) == ""
    cause = f"no name server answers for {NAME}; check that the cluster's DNS is running"
    assert named.echo.output == [f"paceline: cannot find the captain: {cause}\n".encode()]
    clock.pass_time(8.0)
    assert named.connection.reason_to_leave(8.0) == f"could not reach the captain for 8 s (limits.start): {cause}"
    assert len(named.echo.output) == 1


def test_a_name_server_is_not_blamed_once_it_has_answered(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    names.is_down()
    named.connection.dial()
    clock.until(lambda: named.connection._lookup.unanswered)
    clock.pass_time(module.UNANSWERED + 0.1)
    assert named.connection.reason_to_leave(8.0) == "" and named.echo.output
    names.is_up(captain.port)
    captain.close()
    clock.until(
        lambda: named.connection.reason_to_leave(8.0).endswith(f"(limits.start): {named.address}: Connection refused"),
        1.0,
    )
    assert len(named.echo.output) == 1


def test_a_late_name_server_failure_is_ignored_once_a_name_was_found(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    """After a failure, a second query checks for any name server; it may take longer than the next lookup."""
    names.is_down()
    gate = names.block(dns.ALWAYS)
    named.connection.dial()
    clock.until(lambda: dns.ALWAYS in names.queries)
    names.is_up(captain.port)
    clock.until(lambda: captain.peers, 1.0)
    threads = lookup_threads()
    gate.set()
    for thread in threads:
        thread.join(SOON)
    assert threads and not named.connection._lookup.unanswered


def test_a_failed_external_lookup_is_not_blamed_on_the_name_server_of_the_cluster(
    named: Host, names: Names, clock: Clock
) -> None:
    names.is_down()
    names.always = None
    named.connection.dial()
    clock.until(lambda: dns.ALWAYS in names.queries and clock.waits)
    for thread in lookup_threads():
        thread.join(SOON)
    clock.pass_time(10.0)
    assert named.connection.reason_to_leave(8.0).endswith(f"(limits.start): {named.address}: the name was not found")
    assert named.echo.output == []


def test_a_lookup_that_takes_longer_than_the_limit_is_the_reason(named: Host, names: Names, clock: Clock) -> None:
    names.block(NAME)
    named.connection.dial()
    clock.until(lambda: names.queries)
    clock.pass_time(10.0)
    assert (
        named.connection.reason_to_leave(8.0)
        == f"could not reach the captain for 8 s (limits.start): the name lookup of {NAME} has not finished"
    )
