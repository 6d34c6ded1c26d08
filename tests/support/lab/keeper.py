"""The one process of a cluster that lives outside of it: it outlives whoever started it, and clears away the rest."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import signal
import socket
import subprocess
import sys
from types import FrameType

from support.lab import cgroups, limits, namespaces, pki, wire
from support.lab.inside import Settings
from support.lab.places import Place, locked


def main(settings: Settings, alive: int) -> None:
    place = Place(settings.name)
    try:
        _keep(place, settings, alive)
    finally:
        with locked(place.starting):
            clear_away(place)


def _keep(place: Place, settings: Settings, alive: int) -> None:
    """Bring the cluster up, and be back when it has ended."""
    api = socket.create_server(("127.0.0.1", 0))
    pki.write_all(place.pki, settings.nodes, f"https://127.0.0.1:{api.getsockname()[1]}")
    control = wire.listen(place.socket)
    place.shared.mkdir()
    given = dataclasses.replace(settings, api=api.fileno(), control=control.fileno())
    command = [
        # Should this process be killed, the kernel ends the one below, and with it everything.
        "setpriv", "--pdeathsig", "KILL", *namespaces.NEW, "--net",
        sys.executable, "-m", "support.lab.inside", given.to_json(),
    ]  # fmt: skip
    fds = (alive, given.api, given.control, given.first)
    inside = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)

    def asked_to_end(number: int, frame: FrameType | None) -> None:
        namespaces.kill(inside)

    signal.signal(signal.SIGTERM, asked_to_end)
    api.close()
    control.close()
    socket.close(given.first)
    place.pid.write_text(str(namespaces.first_process(inside)))
    inside.wait()


def clear_away(place: Place) -> None:
    """What a cluster that has ended leaves: its cgroups and its folder."""
    cgroups.remove(cgroups.name(place.name))
    shutil.rmtree(place.folder, ignore_errors=True)
    place.alive.unlink(missing_ok=True)
    limits.put_back(place)


def sweep(place: Place) -> None:
    """Clear away after clusters whose keeper was killed, this one or others."""
    with locked(place.starting):
        for path in place.alive.parent.glob("*.lock"):
            with path.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                clear_away(Place(path.stem))


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]), int(sys.argv[2]))
