"""The only process of a cluster outside its namespaces: it outlives the process that started it, and cleans up."""

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
    """Starts the cluster, and returns when it has ended."""
    api = socket.create_server(("127.0.0.1", 0))
    pki.write_all(place.pki, settings.nodes, f"https://127.0.0.1:{api.getsockname()[1]}")
    control = wire.listen(place.socket)
    place.shared.mkdir()
    inner_settings = dataclasses.replace(settings, api=api.fileno(), control=control.fileno())
    command = [
        # If this process is killed, the kernel kills its child, and with it the whole cluster.
        "setpriv", "--pdeathsig", "KILL", *namespaces.NEW, "--net",
        sys.executable, "-m", "support.lab.inside", inner_settings.to_json(),
    ]  # fmt: skip
    fds = (alive, inner_settings.api, inner_settings.control, inner_settings.first)
    inside = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        namespaces.kill(inside)

    signal.signal(signal.SIGTERM, on_sigterm)
    api.close()
    control.close()
    socket.close(inner_settings.first)
    place.pid.write_text(str(namespaces.first_process(inside)))
    inside.wait()


def clear_away(place: Place) -> None:
    """Removes the cgroups and the folder of a cluster that has ended."""
    cgroups.remove(cgroups.name(place.name))
    shutil.rmtree(place.folder, ignore_errors=True)
    place.alive.unlink(missing_ok=True)
    limits.put_back(place)


def sweep(place: Place) -> None:
    """Cleans up after all clusters whose keeper was killed."""
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
