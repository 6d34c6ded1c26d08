"""`paceline validate`: checks a job file and counts its tasks."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.options import JobArgument, JsonOption, SetOption
from paceline.cli.output import one_of, print_json, tell


def main(job: JobArgument = "job.yaml", overrides: SetOption = None, output: JsonOption = "") -> int:
    """Check a job file and report every mistake with its line.

    Exit code: 0 if the job file is valid, otherwise 2.
    """
    one_of(output, ("json",))
    from paceline.client import jobs
    from paceline.job import JobError, load
    from paceline.view.text.wording import count

    try:
        loaded = load(Path(job), overrides or [])
    except JobError as error:
        if not output:
            raise
        print_json(jobs.validation_form(job, error))
        return 2
    if output:
        print_json(jobs.validation_form(job, loaded))
        return 0
    for note in loaded.notes:
        tell(f"note: {note}")
    limits = jobs.limits_of_tasks(loaded)
    amounts = []
    for role, tasks in jobs.tasks_of(loaded).items():
        fewest, most = limits[role]
        limit = f" ({fewest} to {most})" if most > tasks else f" (at least {fewest})" if fewest < tasks else ""
        amounts.append((f"{tasks} ps" if role == "ps" else count(tasks, role)) + limit)
    print(f"{job} is valid: {', '.join(amounts)}")
    return 0
