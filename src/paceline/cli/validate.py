"""`paceline validate`: whether a job file is right, and what it comes to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.cli.options import JobArgument, JsonOption, SetOption
from paceline.cli.say import one_of, print_json, tell


def main(job: JobArgument = "job.yaml", overrides: SetOption = None, output: JsonOption = "") -> int:
    """Check a job file. Exit code 0 where it is valid, 2 where it is not, with every mistake and its line."""
    one_of(output, ("json",))
    from paceline import plan
    from paceline.job import JobError, load
    from paceline.view.words import count

    try:
        loaded = load(Path(job), overrides or [])
    except JobError as error:
        if not output:
            raise
        print_json({"job": job, "valid": False, "problems": [asdict(problem) for problem in error.problems]})
        return 2
    planned = plan.make(loaded.job)
    tasks = {role.name: len(planned.tasks_of(role.name)) for role in planned.roles}
    if output:
        print_json({"job": job, "valid": True, "name": planned.name, "tasks": tasks, "notes": list(loaded.notes)})
        return 0
    for note in loaded.notes:
        tell(f"note: {note}")
    amounts = ", ".join(f"{n} ps" if role == "ps" else count(n, role) for role, n in tasks.items())
    print(f"{job} is valid: {amounts}")
    return 0
