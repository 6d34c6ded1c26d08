"""`paceline stacks` on a real run: tasks that wait in Python or in C, with the GIL and without, below a shell, or for
each other, and one that is not Python. None of them is disturbed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from support.runs import PROGRAMS, Starter, eventually, job

pytestmark = pytest.mark.timeout(400)

PROGRAM = PROGRAMS / "waits.py"
TASKS = ["worker-0", "worker-1", "worker-2", "evaluator-0"]


@contextlib.contextmanager
def pipes(folder: Path) -> Iterator[dict[str, int]]:
    """Pipes to the tasks that run Python; the tasks wait until they have been written to."""
    for name in TASKS:
        os.mkfifo(folder / name)
    ends = {name: os.open(folder / name, os.O_RDWR) for name in TASKS}
    try:
        yield ends
    finally:
        for end in ends.values():
            os.close(end)


def test_stacks_of_tasks_that_wait_and_of_one_that_is_not_python(start: Starter, state: Path) -> None:
    python = ["python", str(PROGRAM), str(state)]
    below_a_shell = f"if test $PACELINE_INDEX = 0; then {' '.join(python)} python; exit $?; fi"
    not_python = f"while test ! -e {state}/end; do sleep 0.1; done"
    evaluator = {"replicas": 2, "command": ["sh", "-c", f"{below_a_shell}; {not_python}"]}
    roles = {"worker": {"replicas": 3}, "evaluator": evaluator}
    with pipes(state) as ends:
        run = start(job([*python, "c"], roles=roles, restart={"limit": 0}))
        for name in TASKS:
            run.wait_for_step(task=name)

        def in_calls() -> dict[str, Any]:
            """The first stacks that show all threads of all tasks in the calls in which they wait. On a busy machine, a
            thread may not reply in time."""
            result = run.call("stacks", "-o", "json")
            assert result.returncode == 0, result.stderr
            tasks = {process["task"]: process for process in json.loads(result.stdout)["tasks"]}
            assert set(tasks) == {*TASKS, "evaluator-1"}
            threads = [tasks[name]["threads"] for name in TASKS]
            functions = [each[0]["frames"][0]["function"] for each in threads if len(each) == 2]
            return tasks if functions == ["wait_in_python", "wait_in_c", "wait_in_c", "wait_in_python"] else {}

        tasks = eventually("all tasks wait", in_calls, more=run.story)
        for name in TASKS:
            main, other = tasks[name]["threads"]
            assert main["main"] and [frame["function"] for frame in main["frames"]][1:] == ["<module>"]
            assert not other["main"] and "in_thread" in [frame["function"] for frame in other["frames"]]
        assert tasks["evaluator-1"]["threads"] == [] and "is not Python" in tasks["evaluator-1"]["problem"]

        def shown() -> bool:
            text = run.call("stacks", "--task", "worker-1", "--task", "evaluator-1").stdout.splitlines()
            assert text[0].startswith("evaluator-1: no stacks: it runs ")
            return text[1].startswith("worker-1: waits.py:") and text[1].endswith(" in wait_in_c")

        eventually("worker-1 waits in C", shown, more=run.story)

        sampled = run.call("stacks", "--task", "worker", "--seconds", "3")
        svg, profile = (run.place / name for name in sampled.stdout.split())
        titles = [title.text for title in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}title")]
        assert any(title and "wait_in_c" in title for title in titles)
        profiles = json.loads(profile.read_text())["profiles"]
        assert [each["name"] for each in profiles[:3]] == [f"worker-{index}, main thread" for index in range(3)]

        for end in ends.values():
            os.write(end, b"!")
        (state / "end").touch()
        report = run.succeeds()
    assert (report["generations"], report["restarts"]) == (1, [])


@pytest.mark.long
def test_stacks_of_a_torch_task_that_waits_for_another_one_in_a_collective(start: Starter, state: Path) -> None:
    program = PROGRAMS / "torch_waits.py"
    line = next(number for number, text in enumerate(program.read_text().splitlines(), 1) if text.endswith("# here"))
    os.mkfifo(state / "pipe")
    end = os.open(state / "pipe", os.O_RDWR)
    try:
        command = ["python", str(program), str(state / "pipe")]
        run = start(job(command, framework="torch", restart={"limit": 0, "warm": False}))
        for name in ("worker-0", "worker-1"):
            run.wait_for_step(task=name)

        def frames(task: str) -> list[tuple[str, int]]:
            """Of its main thread: function and line, the innermost first."""
            result = run.call("stacks", "--task", task, "-o", "json")
            assert result.returncode == 0, result.stderr
            [process] = json.loads(result.stdout)["tasks"]
            if not process["threads"] or not process["threads"][0]["main"]:
                return [("", 0)]  # it did not reply in time: the machine is busy
            stack = process["threads"][0]["frames"]
            assert stack[-1]["file"].endswith("torch_waits.py"), process
            return [(frame["function"], frame["line"]) for frame in stack]

        def in_collective() -> bool:
            stack = frames("worker-0")
            return stack[-1] == ("<module>", line) and any(name == "all_reduce" for name, _ in stack[:-1])

        eventually("worker-0 waits in the second all_reduce", in_collective, more=run.story)
        eventually("it still does: asking has not interrupted it", in_collective, more=run.story)
        eventually("worker-1 waits for the test", lambda: frames("worker-1")[-1] == ("<module>", line - 1))
        sampled = run.call("stacks", "--task", "worker-0", "--seconds", "1", "-o", "json")
        assert sampled.returncode == 0 and all(event["event"] != "task-exited" for event in run.events())

        os.write(end, b"!")
        report = run.succeeds()
    finally:
        os.close(end)
    assert (report["generations"], report["restarts"], report["steps"]) == (1, [], 2)
