"""Tasks connect to the first one of their group only once it listens: TensorFlow and JAX try again only after a second
if it does not listen yet, as happens when all tasks start at the same time.

Loaded like the other hooks, in all tasks of a group but the first. A version of a framework that does not have the
wrapped functions is not changed.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# module -> the method of it that connects to the first task
JOINS = {
    "tensorflow.python.distribute.collective_all_reduce_strategy": (
        "CollectiveAllReduceExtended._initialize_multi_worker"
    ),
    "jax._src.distributed": "State.initialize",
}
LIMIT_S = 60.0  # after that, the framework itself waits
EVERY_S = 0.005


def register(module: "Any") -> None:
    try:
        name, function = JOINS[module.__name__].split(".")
        holder = getattr(module, name)
        setattr(holder, function, _waiting(vars(holder)[function]))
    except (AttributeError, KeyError):
        return


def _waiting(original: "Callable[..., Any]") -> "Callable[..., Any]":
    import functools  # not at the top: the program may not have imported it yet

    @functools.wraps(original)
    def join(*args: "Any", **kwargs: "Any") -> "Any":
        address = os.environ.get("PACELINE_LEADER", "")
        if _connects_to(address, *args[1:2], **kwargs):
            wait_for_listener(address)
        return original(*args, **kwargs)

    return join


def _connects_to(address: str, first: "Any" = None, **kwargs: "Any") -> bool:
    """Whether the program uses the group that Paceline has described: it may have its own."""
    if hasattr(first, "cluster_spec"):  # of TensorFlow
        return any(address in addresses for addresses in first.cluster_spec().as_dict().values())
    own = kwargs.get("coordinator_address", first) or os.environ.get("JAX_COORDINATOR_ADDRESS")
    return own is None or own == address


def wait_for_listener(address: str) -> None:
    import socket
    import time

    host, _, port = address.rpartition(":")
    until = time.monotonic() + LIMIT_S
    while host and time.monotonic() < until:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
            return
        except (OSError, ValueError):
            time.sleep(EVERY_S)
