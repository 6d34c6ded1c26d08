"""Checks that the folder, scripts and programs of a job exist on this machine. Nothing is imported or run."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.agent.tasks import variable_references
from paceline.agent.tasks.python_command import CODE, MODULE, active_interpreter, parse_python, with_program_found
from paceline.job import ingest_section
from paceline.job.errors import Finding, visible
from paceline.job.schema_models import Job
from paceline.job.similar_names import did_you_mean, nearest
from paceline.plan import CODE_IN_IMAGE, with_absolute_paths

Steps = tuple[str | int, ...]

MAX_NAMES = 20_000  # names in a folder to search for a similar one


def code_of(job: Job, folder: Path) -> str:
    """The absolute folder that tasks run in, or CODE_IN_IMAGE."""
    return job.code if job.code == CODE_IN_IMAGE else str(_code_folder(job, folder))


def _code_folder(job: Job, folder: Path) -> Path:
    return Path(os.path.abspath(folder / os.path.expanduser(job.code)))  # noqa: PTH100, PTH111 (these never raise)


def with_credentials(job: Job) -> Job:
    """Make the paths of credentials in variables absolute, because agents and tasks run in different folders."""
    if job.code == CODE_IN_IMAGE:
        return job
    roles = {
        name: [pool.model_copy(update={"env": with_absolute_paths(pool.env, job.code)}) for pool in pools]
        for name, pools in job.roles.items()
    }
    return job.model_copy(update={"env": with_absolute_paths(job.env, job.code), "roles": roles})


def check(job: Job, folder: Path, broken: Sequence[Steps], cluster: bool) -> list[Finding]:
    """Find files that the job names but that do not exist. With `cluster`, files of images are not checked."""
    if ("code",) in broken or job.code == CODE_IN_IMAGE:
        return []
    code = _code_folder(job, folder)
    kind = _kind(code)
    if kind != "folder":
        others = [name for name in _names(code.parent) if _kind(code.parent / name) == "folder"]
        hint = did_you_mean(code.name, [*others, *([] if "/" in job.code else [CODE_IN_IMAGE])])
        problem = "is a file, not a folder" if kind == "file" else "does not exist"
        return [
            Finding(
                ("code",), f'the folder "{visible(job.code)}" {problem}: looked for {visible(str(code), 300)}', hint
            )
        ]
    findings: list[Finding] = []
    roles_with_command = [role for role, pools in job.roles.items() if pools[0].command is not None]
    if job.command is not None and len(roles_with_command) < len(job.roles):
        findings += _command(
            _valid_part(job.command, ("command",), broken), ("command",), code, job.env.get("PATH"), cluster
        )
    for role in roles_with_command:
        steps: Steps = ("roles", role, 0, "command")
        path = {**job.env, **job.roles[role][0].env}.get("PATH")
        findings += _command(_valid_part(job.roles[role][0].command or [], steps, broken), steps, code, path, cluster)
    for name, command in job.programs.items():
        steps = (name, "command")
        findings += _command(_valid_part(command, steps, broken), steps, code, job.env.get("PATH"), cluster)
    if job.ingest is not None:
        steps = ("ingest", "command")
        path = {**job.env, **_ingest_env(job)}.get("PATH")
        findings += _command(_valid_part(job.ingest.command, steps, broken), steps, code, path, cluster)
        findings += ingest_section.check_inputs(job.ingest, code, broken, cluster)
    return findings


def _ingest_env(job: Job) -> dict[str, str]:
    """The variables of the role whose first host creates the data."""
    pools = job.roles.get("chief") or job.roles.get("worker") or []
    return pools[0].env if pools else {}


def script_of(command: Sequence[str]) -> tuple[int, str, bool] | None:
    """For a command that starts Python: the position and name of its script or module, and whether it is a module.

    >>> script_of(["python", "-u", "train.py", "--epochs", "3"])
    (2, 'train.py', False)
    >>> script_of(["python3", "-um", "pkg.train"])
    (2, 'pkg.train', True)
    >>> script_of(["bash", "run.sh"]) is None
    True
    """
    python = parse_python(command)
    if python is None or python.kind == CODE:
        return None
    return len(command) - len(python.args) - 1, python.target, python.kind == MODULE


def _command(command: Sequence[str], steps: Steps, code: Path, path: str | None, cluster: bool) -> Iterator[Finding]:
    if not command:
        return
    program = command[0]
    if program in ("python", "python3"):
        if len(command) == 1:
            yield Finding((*steps, 0), "runs Python without a script: a task cannot read one from standard input")
    elif "/" in program:
        if not (cluster and program.startswith("/")):
            yield from _program_file(program, (*steps, 0), code)
    elif not cluster and not _is_found(program, path):
        yield Finding(
            (*steps, 0),
            f'the program "{visible(program)}" was not found on PATH',
            _similar_program(program, code, path),
        )
    script = script_of(command)
    if script is not None:
        position, word, is_module = script
        if (cluster and word.startswith("/")) or variable_references.is_changed(word):
            return
        yield from (_module if is_module else _script)(word, (*steps, position), code)


def _program_file(program: str, steps: Steps, code: Path) -> Iterator[Finding]:
    file = code / program
    kind = _kind(file)
    if kind == "folder":
        yield Finding(steps, f'the program "{visible(program)}" is a folder')
    elif kind is None:
        hint = _similar_file(file, program)
        folder = visible(str(file.parent), 300)
        yield Finding(steps, f'the program "{visible(program)}" does not exist: looked in {folder}', hint)
    elif not os.access(file, os.X_OK):
        hint = f"write [python, {program}]" if program.endswith(".py") else f"run chmod +x {program}"
        yield Finding(steps, f'the program "{visible(program)}" is not executable', hint)


def _script(script: str, steps: Steps, code: Path) -> Iterator[Finding]:
    file = code / script
    kind = _kind(file)
    if kind == "folder" and _kind(file / "__main__.py") != "file":
        inside = sorted(name for name in _names(file) if name.endswith(".py"))
        hint = f'did you mean "{script.rstrip("/")}/{nearest("train.py", inside) or inside[0]}"?' if inside else None
        yield Finding(steps, f'the script "{visible(script)}" is a folder', hint)
    elif kind is None:
        folder = visible(str(file.parent), 300)
        yield Finding(
            steps, f'the script "{visible(script)}" does not exist: looked in {folder}', _similar_file(file, script)
        )


def _module(module: str, steps: Steps, code: Path) -> Iterator[Finding]:
    """Only modules in the code folder are checked: others may be installed where tasks run."""
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
                yield Finding(steps, f'the module "{visible(module)}" does not exist: looked in {folder}', hint)
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
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(MAX_NAMES), strict=False)]
    except (OSError, ValueError):
        return []


def _is_found(program: str, path: str | None) -> bool:
    """On PATH, or beside the interpreter that `python` stands for."""
    import shutil

    return shutil.which(with_program_found([program], active_interpreter(), path)[0], path=path) is not None


def _similar_file(file: Path, name: str) -> str | None:
    near = nearest(file.name, _names(file.parent))
    if near is None:
        return None
    return f'did you mean "{name[: len(name) - len(file.name)]}{near}"?' if name.endswith(file.name) else None


def _similar_program(program: str, code: Path, path: str | None) -> str | None:
    if _kind(code / program) == "file":
        return f"did you mean [python, {program}]?" if program.endswith(".py") else f'did you mean "./{program}"?'
    if " " in program:
        return "write each argument as a separate item"
    near = nearest(program, _programs(path if path is not None else os.environ.get("PATH", os.defpath)))
    return f'did you mean "{near}"?' if near else None


@functools.lru_cache(maxsize=4)
def _programs(path: str) -> tuple[str, ...]:
    return tuple(sorted({name for folder in path.split(os.pathsep)[:100] if folder for name in _names(Path(folder))}))


def _valid_part(command: Sequence[str], steps: Steps, broken: Sequence[Steps]) -> Sequence[str]:
    """The arguments of the command before the first invalid one."""
    without_index = tuple(step for step in steps if step != 0)
    invalid = [path[-1] for path in broken if path[:-1] in (steps, without_index)]
    return command[: min((index for index in invalid if isinstance(index, int)), default=len(command))]
