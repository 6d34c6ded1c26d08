"""Real frameworks train in tasks that were forked from a spare as in cold ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from paceline.agent.spares import spare as starting
from paceline.agent.spares.spare import Ready
from support.ports import free_port
from support.spare_processes import (
    LATE,
    STATIC,
    Streams,
    Warm,
    begin,
    run_cold,
    write,
)
from support.spare_processes import nothing_left as nothing_left
from support.spare_processes import parent_of_orphans as parent_of_orphans

# As the loggers of torch, with a stack, and of TensorFlow begin a line.
LOGGED = re.compile(r"(\[rank\d+\]: ?)?\[?[IWE]\d{4} |Exception raised from |frame #\d+: |$")


def environments(framework: str, size: int) -> list[dict[str, str]]:
    ports = [free_port() for _ in range(size)]
    workers = [f"127.0.0.1:{port}" for port in ports]
    result = []
    for rank in range(size):
        late = {"PACELINE_RANK": str(rank), "PACELINE_WORLD_SIZE": str(size), "PACELINE_LOCAL_INDEX": "0"}
        if framework == "torch":
            late |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "RANK": str(rank)}
            late |= {"WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        else:
            late["PACELINE_JAX_COORDINATOR"] = workers[0]
        result.append({**STATIC, **late})
    return result


def without_logs(text: str) -> str:
    """Without the lines that C++ code of frameworks logs, for example if another rank has exited slightly earlier."""
    return "".join(line for line in text.splitlines(keepends=True) if not LOGGED.match(line))


TORCH = """
    import os, sys, hashlib
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self): return 32
        def __getitem__(self, at): return torch.full((4,), at / 32.0)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for method in ("fork", "spawn") if dist.get_rank() == 0 else ("fork", "fork"):
            for rows in DataLoader(Rows(), batch_size=16, num_workers=1, multiprocessing_context=method):
                optimizer.zero_grad()
                model(rows + dist.get_rank()).square().mean().backward()
                optimizer.step()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        dist.destroy_process_group()
        print("weights", digest)
"""
PROGRAMS = Path(__file__).parent.parent / "programs"


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.long), "jax"])
def test_tasks_forked_from_one_spare_train_together_as_cold_ones_do(tmp_path: Path, framework: str) -> None:
    """For TensorFlow, see test_kills.py."""
    write(tmp_path / "ddp.py", TORCH)
    command = {
        "torch": ["python", "ddp.py"],
        "jax": ["python", str(PROGRAMS / "jax_allreduce.py"), "--steps", "3"],
    }[framework]
    started = [
        begin(command, tmp_path, env, tmp_path / f"record-{rank}")
        for rank, env in enumerate(environments(framework, 2))
    ]
    cold = [streams.end(pid) for pid, streams in started]
    assert [ended.code for ended in cold] == [0, 0], cold
    with Warm(command, tmp_path, starting.read_record(tmp_path / "record-0")) as warm:
        assert isinstance(warm.state, Ready) and warm.state.rss > 50 << 20 and warm.state.modules > 300
        for _ in range(2):
            started = [warm.begin(env) for env in environments(framework, 2)]
            ended = [streams.end(pid) for pid, streams in started]
            assert [(task.code, without_logs(task.err), task.reports) for task in ended] == [(0, "", [])] * 2
            weights = {line for task in ended + cold for line in task.out.splitlines() if line.startswith("weights ")}
            assert len(weights) == 1, (ended, cold)


def test_jax_finds_the_run_in_python_processes_that_a_shell_starts(tmp_path: Path) -> None:
    write(tmp_path / "lib/sitecustomize.py", "print('mine')")
    program = f"{sys.executable} {PROGRAMS / 'jax_allreduce.py'} --steps 2"
    started = []
    for env in environments("jax", 2):
        streams = Streams()
        env["PYTHONPATH"] = str(tmp_path / "lib")
        started.append((starting.start_plain(["sh", "-c", program], env, str(tmp_path), *streams.task_fds), streams))
        streams.release()
    for rank, (pid, streams) in enumerate(started):
        ended = streams.end(pid)
        assert (ended.code, without_logs(ended.err)) == (0, "")
        assert ended.out.startswith("mine\n") and f"rank {rank} of 2, 2 devices" in ended.out


def test_a_task_reports_how_far_its_start_has_come_cold_and_from_a_spare(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    write(site / "torch/__init__.py", "import torch.distributed")
    write(site / "torch/distributed/__init__.py", "from torch.distributed.distributed_c10d import init_process_group")
    write(site / "torch/distributed/distributed_c10d.py", "def init_process_group(backend): return backend + ' formed'")
    write(tmp_path / "t.py", """
        import os
        os.environ["PACELINE_REPORT_INODE"] = str(os.fstat(3).st_ino)
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
        if os.fork() == 0:
            dist.init_process_group("that of a child")
            os._exit(0)
        os.wait()
        print(dist.init_process_group("gloo"), dist.init_process_group is distributed_c10d.init_process_group)
    """)  # fmt: skip
    env = {**STATIC, "PYTHONPATH": str(site)}
    task = {**env, **LATE, "PACELINE_REPORT_FD": "3", "PACELINE_REPORT_INODE": "0"}
    cold = run_cold(["python", "t.py"], tmp_path, task, tmp_path / "record.jsonl")
    with Warm(["python", "t.py"], tmp_path, starting.read_record(tmp_path / "record.jsonl"), env) as warm:
        assert isinstance(warm.state, Ready) and warm.state.modules == 3
        from_spare = warm.run(task)
    for ended in (cold, from_spare):
        assert (ended.code, ended.out, ended.err) == (0, "gloo formed True\n", "")
        assert [(report["_"], report["stage"], report["framework"]) for report in ended.reports] == [
            ("start", "imported", "torch"), ("start", "joining", "torch"), ("start", "joined", "torch"),
        ]  # fmt: skip
    assert cold.reports[-1]["imports"] > 0 == from_spare.reports[-1]["imports"]


def test_an_incompatible_jax_is_not_modified(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    write(site / "jax/__init__.py", "")
    write(site / "jax/_src/__init__.py", "")
    write(site / "jax/_src/clusters.py", "X = 1")
    write(
        tmp_path / "t.py",
        "import jax._src.clusters as c; print(c.X, type(c.__loader__).__name__, c.__spec__.loader is c.__loader__)",
    )
    env = {**STATIC, "PYTHONPATH": str(site), "PACELINE_JAX_COORDINATOR": "127.0.0.1:1"}
    ended = run_cold(["python", "t.py"], tmp_path, env)
    assert (ended.code, ended.out) == (0, "1 SourceFileLoader True\n")
    assert len(ended.err.splitlines()) == 1 and "cannot register this run with JAX" in ended.err
