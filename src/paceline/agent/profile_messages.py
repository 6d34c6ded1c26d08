"""Profiles of tasks, as messages: what the captain requests from members, and what they reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from paceline.agent.fast_dataclass import record
from paceline.agent.net.codec import Seconds
from paceline.plan import Plan

MOST_STEPS = 1000  # of one request
MOST_SECONDS = 3600.0  # in which tasks complete the steps
MOST_BYTES = 256 * 1024 * 1024  # of the files of a task
FINISH_WITHIN = 60.0  # seconds after that in which profilers write their files
ANSWER_WITHIN = 4.0  # seconds after that in which all hosts have to reply
FOLDER = "plugins/profile"  # in the folder of a run's TensorBoard files; the name is that of TensorBoard's plugins


@record
class TakeProfile:
    """Profile the next steps of these tasks, and reply with a ProfileTaken for each."""

    request: int
    tasks: tuple[str, ...]
    steps: int
    seconds: Seconds  # in which tasks complete the steps
    session: str  # name of the folder of this profile, the same on all hosts


@record
class ProfileTaken:
    """The profile of a task. `problem`: why there are no files, or why they show fewer steps than requested."""

    host: str
    request: int
    task: str
    problem: str = ""
    steps: int = 0
    files: Mapping[str, int] = field(default_factory=dict)  # path in the folder of TensorBoard files -> bytes
    last: bool = False  # whether it is the last reply of this host


def profiled_tasks(plan: Plan) -> list[str]:
    """The tasks that report steps of training: not parameter servers and evaluators; and in a parameter-server job with
    a chief not its workers, which only serve."""
    has_chief = any(role.name == "chief" for role in plan.roles)
    roles = ("chief",) if has_chief and plan.strategy == "parameter-server" else ("chief", "worker")
    return [task.name for task in plan.tasks if task.role in roles]
