"""What a job needs from this machine's files: its folder, its scripts, its programs. Nothing is imported or run."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.job import ingest
from paceline.job.errors import Finding, did_you_mean, nearest, visible
from paceline.job.models import Job
from paceline.plan import CODE_IN_IMAGE, absolute

Steps = tuple[str | int, ...]

MOST_NAMES = 20_000  # names in a folder that are looked through for a near one
_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.[0-9]+)?)?")
_TAKES_NEXT = ("W", "X")


def code_of(job: Job, folder: Path) -> str:
    """The absolute folder that tasks run in, or CODE_IN_IMAGE."""
    return job.code if job.code == CODE_IN_IMAGE else str(_code_folder(job, folder))


def _code_folder(job: Job, folder: Path) -> Path:
    return Path(os.path.abspath(folder / os.path.expanduser(job.code)))  # noqa: PTH100, PTH111 (these never raise)


def with_credentials(job: Job) -> Job:
    """With the whole path of those that variables name, as its tasks would find them: agents work in other folders."""
    if job.code == CODE_IN_IMAGE:
        return job
    roles = {
        name: [group.model_copy(update={"env": absolute(group.env, job.code)}) for group in groups]
        for name, groups in job.roles.items()
    }
    return job.model_copy(update={"env": absolute(job.env, job.code), "roles": roles})


def check(job: Job, folder: Path, broken: Sequence[Steps], cluster: bool) -> list[Finding]:
    """Everything that the job names and that is not there. Of a cluster's images nothing is known."""
    if ("code",) in broken or job.code == CODE_IN_IMAGE:
        return []
    code = _code_folder(job, folder)
    kind = _kind(code)
    if kind != "folder":
        others = [name for name in _names(code.parent) if _kind(code.parent / name) == "folder"]
        hint = did_you_mean(code.name, [*others, *([] if "/" in job.code else [CODE_IN_IMAGE])])
        what = "is a file, not a folder" if kind == "file" else "is not there"
        return [
            Finding(("code",), f'the folder "{visible(job.code)}" {what}: looked for {visible(str(code), 300)}', hint)
        ]
    findings: list[Finding] = []
    own = [role for role, groups in job.roles.items() if groups[0].command is not None]
    if job.command is not None and len(own) < len(job.roles):
        findings += _command(
            _sound(job.command, ("command",), broken), ("command",), code, job.env.get("PATH"), cluster
        )
    for role in own:
        steps: Steps = ("roles", role, 0, "command")
        path = {**job.env, **job.roles[role][0].env}.get("PATH")
        findings += _command(_sound(job.roles[role][0].command or [], steps, broken), steps, code, path, cluster)
    for name, command in job.programs.items():
        steps = (name, "command")
        findings += _command(_sound(command, steps, broken), steps, code, job.env.get("PATH"), cluster)
    if job.ingest is not None:
        steps = ("ingest", "command")
        path = {**job.env, **_deciding(job)}.get("PATH")
        findings += _command(_sound(job.ingest.command, steps, broken), steps, code, path, cluster)
        findings += ingest.check_inputs(job.ingest, code, broken, cluster)
    return findings


def _deciding(job: Job) -> dict[str, str]:
    """The variables of the role whose first host makes the data."""
    groups = job.roles.get("chief") or job.roles.get("worker") or []
    return groups[0].env if groups else {}


def script_of(command: Sequence[str]) -> tuple[int, str, bool] | None:
    """Of a command that starts Python: the position and text of its script, or of its module (then True).

    >>> script_of(["python", "-u", "train.py", "--epochs", "3"])
    (2, 'train.py', False)
    >>> script_of(["python3", "-um", "pkg.train"])
    (2, 'pkg.train', True)
    >>> script_of(["bash", "run.sh"]) is None
    True
    """
    if not _PYTHON.fullmatch(command[0]):
        return None
    position = 1
    while position < len(command):
        word = command[position]
        if word == "-" or not word.startswith("-"):
            return None if word == "-" else (position, word, False)
        if word == "--check-hash-based-pycs":
            position += 1
        elif not word.startswith("--"):
            taken = re.search("[cmWX]", word[1:])
            rest = word[1:][taken.end() :] if taken else ""
            if taken and taken[0] == "c":
                return None
            if taken and taken[0] == "m":
                if rest:
                    return position, rest, True
                return (position + 1, command[position + 1], True) if position + 1 < len(command) else None
            if taken and not rest:
                position += 1
        position += 1
    return None


def _command(command: Sequence[str], steps: Steps, code: Path, path: str | None, cluster: bool) -> Iterator[Finding]:
    if not command:
        return
    program = command[0]
    if program in ("python", "python3"):
        if len(command) == 1:
            yield Finding((*steps, 0), "runs Python without a script: a task has no input to read one from")
    elif "/" in program:
        if not (cluster and program.startswith("/")):
            yield from _program_file(program, (*steps, 0), code)
    elif not cluster and not _on_path(program, path):
        yield Finding((*steps, 0), f'the program "{visible(program)}" is not found', _like_program(program, code, path))
    script = script_of(command)
    if script is not None:
        position, word, module = script
        if cluster and word.startswith("/"):
            return
        yield from (_module if module else _script)(word, (*steps, position), code)


def _program_file(program: str, steps: Steps, code: Path) -> Iterator[Finding]:
    file = code / program
    kind = _kind(file)
    if kind == "folder":
        yield Finding(steps, f'the program "{visible(program)}" is a folder')
    elif kind is None:
        hint = _like_file(file, program)
        where = visible(str(file.parent), 300)
        yield Finding(steps, f'the program "{visible(program)}" is not there: looked in {where}', hint)
    elif not os.access(file, os.X_OK):
        hint = f"write [python, {program}]" if program.endswith(".py") else f"chmod +x {program}"
        yield Finding(steps, f'the program "{visible(program)}" may not be executed', hint)


def _script(script: str, steps: Steps, code: Path) -> Iterator[Finding]:
    file = code / script
    kind = _kind(file)
    if kind == "folder" and _kind(file / "__main__.py") != "file":
        inside = sorted(name for name in _names(file) if name.endswith(".py"))
        hint = f'did you mean "{script.rstrip("/")}/{nearest("train.py", inside) or inside[0]}"?' if inside else None
        yield Finding(steps, f'the script "{visible(script)}" is a folder', hint)
    elif kind is None:
        where = visible(str(file.parent), 300)
        yield Finding(
            steps, f'the script "{visible(script)}" is not there: looked in {where}', _like_file(file, script)
        )


def _module(module: str, steps: Steps, code: Path) -> Iterator[Finding]:
    """Only what lies in the code folder is looked at: other modules may be installed where tasks run."""
    parts = module.split(".")
    folder = code
    for depth, part in enumerate(parts):
        if not part or _kind(folder / f"{part}.py") == "file":
            return
        if _kind(folder / part / "__init__.py") != "file":
            if depth > 0:
                names = {name.removesuffix(".py") for name in _names(folder) if not name.startswith((".", "__"))}
                near = nearest(part, names)
                hint = f'did you mean "{".".join([*parts[:depth], near])}"?' if near else None
                yield Finding(steps, f'the module "{visible(module)}" is not there: looked in {folder}', hint)
            return
        folder = folder / part
    if _kind(folder / "__main__.py") != "file":
        yield Finding(steps, f'"{visible(module)}" is a package without a __main__.py: Python cannot run it', None)


def _kind(path: Path) -> str | None:
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (OSError, ValueError):
        return None


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as found:
            return [entry.name for entry, _ in zip(found, range(MOST_NAMES), strict=False)]
    except (OSError, ValueError):
        return []


def _on_path(program: str, path: str | None) -> bool:
    import shutil

    return shutil.which(program, path=path) is not None


def _like_file(file: Path, written: str) -> str | None:
    near = nearest(file.name, _names(file.parent))
    if near is None:
        return None
    return f'did you mean "{written[: len(written) - len(file.name)]}{near}"?' if written.endswith(file.name) else None


def _like_program(program: str, code: Path, path: str | None) -> str | None:
    if _kind(code / program) == "file":
        return f"did you mean [python, {program}]?" if program.endswith(".py") else f'did you mean "./{program}"?'
    if " " in program:
        return "every word of the command is an item of its own"
    near = nearest(program, _programs(path if path is not None else os.environ.get("PATH", os.defpath)))
    return f'did you mean "{near}"?' if near else None


@functools.lru_cache(maxsize=4)
def _programs(path: str) -> tuple[str, ...]:
    return tuple(sorted({name for folder in path.split(os.pathsep)[:100] if folder for name in _names(Path(folder))}))


def _sound(command: Sequence[str], steps: Steps, broken: Sequence[Steps]) -> Sequence[str]:
    """The words before the first that was refused."""
    alone = tuple(step for step in steps if step != 0)
    refused = [path[-1] for path in broken if path[:-1] in (steps, alone)]
    return command[: min((index for index in refused if isinstance(index, int)), default=len(command))]
