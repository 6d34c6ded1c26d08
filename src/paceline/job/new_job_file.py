"""The contents of a new job file, for `paceline init` and `paceline run --framework ... -- command`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from paceline.job.values import slug
from paceline.job.yaml_writer import write


def job_text(
    framework: str,
    workers: int,
    strategy: str | None = None,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
    gpus: int | None = None,
    name: str | None = None,
    *,
    command: Sequence[str],
    folder: Path,
) -> str:
    """The text of a job file for a command given without one. It is not checked: pass it to load_text."""
    if strategy is None and ps and framework == "tensorflow":
        strategy = "parameter-server"
    training = {} if gpus is None else {"gpus": gpus}
    roles: dict[str, Any] = {}
    if chief:
        roles["chief"] = {"replicas": 1} | ({} if gpus is None else {"gpus": min(gpus, 1)})
    if workers or not chief:
        roles["worker"] = {"replicas": workers, **training}
    if ps:
        roles["ps"] = {"replicas": ps}
    if evaluator:
        roles["evaluator"] = {"replicas": 1}
    return write(
        {
            "name": name if name is not None else _name(command, folder),
            "framework": framework,
            **({} if strategy is None else {"strategy": strategy}),
            "command": list(command),
            "roles": roles,
        }
    )


def _name(command: Sequence[str], folder: Path) -> str:
    """A name for the job, from the script, the program or the folder."""
    from paceline.job.file_checks import script_of

    candidates = []
    if command:
        script = script_of(command)
        if script is not None:
            _, word, is_module = script
            candidates.append(word.rpartition(".")[2] if is_module else PurePath(word).stem)
        candidates.append(PurePath(command[0]).stem)
    candidates.append(folder.absolute().name)
    return next((name for name in map(slug, candidates) if name), "job")
