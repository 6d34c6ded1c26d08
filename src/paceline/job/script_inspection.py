"""Finds the framework and strategy of a training script from its source, without running it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError

FRAMEWORKS = {
    "tensorflow": "tensorflow", "tf_keras": "tensorflow", "keras": "tensorflow", "torch": "torch", "lightning": "torch",
    "pytorch_lightning": "torch", "accelerate": "torch", "jax": "jax", "flax": "jax",
}  # fmt: skip
_LIKELY = ("train.py", "main.py", "run.py", "trainer.py", "training.py")
_SKIP = ("setup.py", "conftest.py", "noxfile.py", "manage.py")


@dataclass(frozen=True)
class Script:
    path: Path
    framework: str = "none"
    strategy: str | None = None
    chief: bool = False
    evaluator: bool = False
    distributed: bool = True  # whether several processes of it would train together
    reasons: tuple[str, ...] = ()
    score: int = 0


class UnreadableScript(PacelineError):
    """The script cannot be read, or is not Python."""


def inspect_script(path: Path) -> Script:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UnreadableScript(f"is not valid Python: {error.msg}", where=f"{path}:{error.lineno}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableScript(f"cannot be read: {error}", where=str(path)) from None
    imports = _imports(tree)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(imports)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    framework, reason = _framework(imports)
    script = {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}.get(framework, _other)(path, names, strings)
    score = (
        4 * (framework != "none") + 2 * ("__main__" in strings) + 4 * (path.name in _LIKELY) + 2 * script.distributed
    )
    return Script(
        path,
        framework,
        script.strategy,
        script.chief,
        script.evaluator,
        script.distributed,
        (reason, *script.reasons),
        score,
    )


def _imports(tree: ast.Module) -> dict[str, int]:
    """Imported modules and names, with their lines."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                lines.setdefault(name.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            lines.setdefault(node.module, node.lineno)
            for name in node.names:
                lines.setdefault(name.name, node.lineno)
    return lines


def _framework(imports: dict[str, int]) -> tuple[str, str]:
    # In this order: programs for jax or torch may import tensorflow for its data pipelines.
    for framework in ("jax", "torch", "tensorflow"):
        for module, line in imports.items():
            top = module.partition(".")[0]
            if FRAMEWORKS.get(top) == framework and (top != "keras" or not imports.keys() & {"torch", "jax"}):
                return framework, f"line {line} imports {top}"
    return "none", "it imports none of tensorflow, torch and jax"


def _tensorflow(path: Path, names: set[str], strings: set[str]) -> Script:
    if any("ParameterServerStrategy" in name for name in names):
        reads_cluster_config = "CLUSTER_CONFIG" in strings
        leader = "no chief: it reads CLUSTER_CONFIG" if reads_cluster_config else "with a chief"
        return Script(
            path, "", "parameter-server", chief=not reads_cluster_config, evaluator="evaluator" in strings,
            reasons=(f"it uses ParameterServerStrategy ({leader})",),
        )  # fmt: skip
    evaluator = "evaluator" in strings
    extra = ("it mentions an evaluator",) if evaluator else ()
    if any(re.search("MultiWorkerMirrored", name) for name in names):
        reasons = ("it uses MultiWorkerMirroredStrategy", *extra)
        return Script(path, "", "multi-worker", evaluator=evaluator, reasons=reasons)
    if strings & {"TF_CONFIG", "CLUSTER_CONFIG"}:
        return Script(path, "", "multi-worker", evaluator=evaluator, reasons=("it reads TF_CONFIG", *extra))
    return Script(path, "", "multi-worker", distributed=False, reasons=("it uses no tf.distribute strategy",))


def _torch(path: Path, names: set[str], strings: set[str]) -> Script:
    for name in ("init_process_group", "init_device_mesh", "Accelerator", "Trainer", "DistributedDataParallel"):
        if name in names:
            return Script(path, reasons=(f"it uses {name}",))
    if strings & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return Script(path, reasons=("it reads RANK and WORLD_SIZE",))
    return Script(path, distributed=False, reasons=("it does not call init_process_group",))


def _jax(path: Path, names: set[str], strings: set[str]) -> Script:
    if "jax.distributed" in names or {"distributed", "initialize"} <= names:
        return Script(path, reasons=("it calls jax.distributed.initialize",))
    return Script(path, distributed=False, reasons=("it does not call jax.distributed.initialize",))


def _other(path: Path, names: set[str], strings: set[str]) -> Script:
    return Script(path, distributed=False)


def candidates(folder: Path) -> list[Script]:
    """The scripts in a folder, the most likely training script first."""
    scripts = []
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(("test_", "_")) or path.name in _SKIP or not path.is_file():
            continue
        try:
            scripts.append(inspect_script(path))
        except UnreadableScript:
            continue
    return sorted(scripts, key=lambda script: (-script.score, script.path.name))
