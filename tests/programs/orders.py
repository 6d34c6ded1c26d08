"""Trains step by step with any framework, resumes after its last step when restarted, and fails on orders.

An order is a file in the folder, `order-RANK` (before the next step) or `start-RANK` (before the first). Its text is a
kind of failure, see faults.py, or `listen` for a port that is in use. It is carried out once.
"""

import argparse
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faults

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=("none", "tensorflow", "torch", "jax"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds a step")
    parser.add_argument("--words", type=int, default=20, help="bytes printed a step")
    parser.add_argument(
        "--gate", action="store_true", help="wait for the file `go` without output, before anything else"
    )
    parser.add_argument("--always-raise", type=int, metavar="STEP", help="rank 1 fails before this step, every time")
    options = parser.parse_args()
    rank = int(os.environ["PACELINE_RANK"])
    if options.framework != "none":
        importlib.import_module(options.framework)
    if options.gate:
        (options.folder / f"ready-{rank}").touch()
        while not (options.folder / "go").exists():
            time.sleep(0.01)
    obey(options.folder / f"start-{rank}")
    all_reduce = {"none": nothing, "tensorflow": tensorflow, "torch": torch, "jax": jax}[options.framework]()
    step_file = options.folder / "step"
    start = int(step_file.read_text()) if step_file.exists() else 0
    print(f"start {start}", flush=True)
    for step in range(start + 1, options.steps + 1):
        obey(options.folder / f"order-{rank}")
        if step == options.always_raise and rank == 1:
            faults.fail("raise")
        all_reduce()
        paceline.report(step=step, loss=1 / step)
        print(f"step {step} ".ljust(options.words - 1, "."), flush=True)
        if rank == 0:
            step_file.with_suffix(".partial").write_text(str(step))
            step_file.with_suffix(".partial").replace(step_file)
        if step >= last(options.folder / "finish"):
            break
        time.sleep(options.sleep)
    print("done", flush=True)


def last(finish: Path) -> float:
    """The step after which all ranks end; written well before, so that all of them read it in time."""
    try:
        return int(finish.read_text())
    except FileNotFoundError:
        return float("inf")


def obey(order: Path) -> None:
    try:
        how = order.read_text()
        order.unlink()
    except FileNotFoundError:
        return
    print(f"order {how}", flush=True)
    if how == "listen":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_server(listener.getsockname())
    else:
        faults.fail(how)


def nothing() -> Callable[[], None]:
    return lambda: None


def tensorflow() -> Callable[[], None]:
    tf = sys.modules["tensorflow"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def all_reduce() -> object:
        def reduce_one() -> object:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant([1.0]))

        return strategy.run(reduce_one)

    def step() -> None:
        assert float(strategy.experimental_local_results(all_reduce())[0][0]) == strategy.num_replicas_in_sync

    return step


def torch() -> Callable[[], None]:
    module = sys.modules["torch"]
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo")

    def step() -> None:
        ones = module.ones(1)
        dist.all_reduce(ones)
        assert float(ones) == dist.get_world_size()

    return step


def jax() -> Callable[[], None]:
    module = sys.modules["jax"]
    numpy = importlib.import_module("numpy")
    sharding = importlib.import_module("jax.sharding")
    module.distributed.initialize()
    mesh = sharding.Mesh(numpy.array(module.devices()), ("data",))
    sharded = sharding.NamedSharding(mesh, sharding.PartitionSpec("data"))
    replicated = sharding.NamedSharding(mesh, sharding.PartitionSpec())
    total = module.jit(lambda ones: ones.sum(), out_shardings=replicated)

    def step() -> None:
        ones = module.make_array_from_process_local_data(sharded, numpy.ones(1, "float32"))
        assert float(total(ones)) == module.device_count()

    return step


if __name__ == "__main__":
    main()
