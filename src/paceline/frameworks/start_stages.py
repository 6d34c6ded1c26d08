"""Reports to the agent how far a task's start has come: when it has imported its framework, begins to join the group of
tasks that train together, and has joined it.

Loaded like the other hooks: once the program has imported the module, `register` is called with it. Functions are
wrapped, and behave as before; a version of a framework that does not have them is not changed.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

IMPORTED, JOINING, JOINED = "imported", "joining", "joined"
# module -> the method of it that returns once the group is formed; "": the module is the framework itself
JOINS = {
    "tensorflow": "",
    "torch": "",
    "jax": "",
    # Both constructors return once all workers, or all parameter servers and workers, have answered.
    "tensorflow.python.distribute.collective_all_reduce_strategy": "CollectiveAllReduceStrategy.__init__",
    "tensorflow.python.distribute.parameter_server_strategy_v2": "ParameterServerStrategyV2.__init__",
    "torch.distributed.distributed_c10d": "init_process_group",
    "jax._src.distributed": "State.initialize",
}

seconds_of_imports: "Callable[[], float]" = lambda: 0.0  # replaced by import_recorder  # noqa: E731


def register(module: "Any") -> None:
    name = module.__name__
    if not JOINS[name]:
        report(IMPORTED, framework=name)
        return
    try:
        _wrap(module, name)
    except Exception:
        return  # an unknown version: the program can do without


def _wrap(module: "Any", name: str) -> None:
    holder: Any = module
    *path, function = JOINS[name].split(".")
    for part in path:
        holder = getattr(holder, part)
    original = vars(holder)[function]
    joining = _reporting(original, name.partition(".")[0])
    setattr(holder, function, joining)
    if not path:  # modules that a spare has imported already have their own reference to the function
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(function) is original:
                setattr(other, function, joining)


def _reporting(original: "Callable[..., Any]", framework: str) -> "Callable[..., Any]":
    import functools  # not at the top: the program may not have imported it yet

    @functools.wraps(original)
    def join(*args: "Any", **kwargs: "Any") -> "Any":
        report(JOINING, framework=framework)
        result = original(*args, **kwargs)
        report(JOINED, framework=framework)
        return result

    return join


def report(stage: str, framework: str) -> None:
    """Only the process of the task itself reports: processes that it starts inherit its socket."""
    import json

    try:
        fd = int(os.environ["PACELINE_REPORT_FD"])
        if os.getpid() == os.getsid(0) and str(os.fstat(fd).st_ino) == os.environ["PACELINE_REPORT_INODE"]:
            imports = round(seconds_of_imports(), 4)
            message = {"_": "start", "stage": stage, "framework": framework, "imports": imports}
            os.write(fd, json.dumps(message).encode())
    except (KeyError, ValueError, OSError):
        pass  # training must not be affected
