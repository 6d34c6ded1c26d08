"""What a training script tells about itself: its framework and strategy, read from its text without running it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

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
    distributed: bool = True  # whether it does anything that makes several of it train together
    reasons: tuple[str, ...] = ()
    score: int = 0


class Unreadable(Exception):
    """The script cannot be read as Python; the message says where."""


def look(path: Path) -> Script:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(f"{path}:{error.lineno}: this is not Python: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from None
    imports = _imports(tree)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(imports)
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    framework, why = _framework(imports)
    script = {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}.get(framework, _other)(path, names, words)
    score = 4 * (framework != "none") + 2 * ("__main__" in words) + 4 * (path.name in _LIKELY) + 2 * script.distributed
    return Script(
        path,
        framework,
        script.strategy,
        script.chief,
        script.evaluator,
        script.distributed,
        (why, *script.reasons),
        score,
    )


def _imports(tree: ast.Module) -> dict[str, int]:
    """Imported modules and names, and the lines they stand on."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found.setdefault(name.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.setdefault(node.module, node.lineno)
            for name in node.names:
                found.setdefault(name.name, node.lineno)
    return found


def _framework(imports: dict[str, int]) -> tuple[str, str]:
    # In this order: people import tensorflow for its data pipelines next to jax or torch.
    for wanted in ("jax", "torch", "tensorflow"):
        for module, line in imports.items():
            top = module.partition(".")[0]
            if FRAMEWORKS.get(top) == wanted and (top != "keras" or not imports.keys() & {"torch", "jax"}):
                return wanted, f"line {line} imports {top}"
    return "none", "it imports none of tensorflow, torch and jax"


def _tensorflow(path: Path, names: set[str], words: set[str]) -> Script:
    if any("ParameterServerStrategy" in name for name in names):
        own_contract = "CLUSTER_CONFIG" in words
        leader = "no chief: it reads CLUSTER_CONFIG" if own_contract else "with a chief"
        return Script(
            path, "", "parameter-server", chief=not own_contract, evaluator="evaluator" in words,
            reasons=(f"it uses ParameterServerStrategy ({leader})",),
        )  # fmt: skip
    evaluator = "evaluator" in words
    extra = ("it names an evaluator",) if evaluator else ()
    if any(re.search("MultiWorkerMirrored", name) for name in names):
        why = ("it uses MultiWorkerMirroredStrategy", *extra)
        return Script(path, "", "multi-worker", evaluator=evaluator, reasons=why)
    if words & {"TF_CONFIG", "CLUSTER_CONFIG"}:
        return Script(path, "", "multi-worker", evaluator=evaluator, reasons=("it reads TF_CONFIG", *extra))
    return Script(path, "", "multi-worker", distributed=False, reasons=("it names no tf.distribute strategy",))


def _torch(path: Path, names: set[str], words: set[str]) -> Script:
    for sign in ("init_process_group", "init_device_mesh", "Accelerator", "Trainer", "DistributedDataParallel"):
        if sign in names:
            return Script(path, reasons=(f"it uses {sign}",))
    if words & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return Script(path, reasons=("it reads RANK and WORLD_SIZE",))
    return Script(path, distributed=False, reasons=("it does not call init_process_group",))


def _jax(path: Path, names: set[str], words: set[str]) -> Script:
    if "jax.distributed" in names or {"distributed", "initialize"} <= names:
        return Script(path, reasons=("it calls jax.distributed.initialize",))
    return Script(path, distributed=False, reasons=("it does not call jax.distributed.initialize",))


def _other(path: Path, names: set[str], words: set[str]) -> Script:
    return Script(path, distributed=False)


def candidates(folder: Path) -> list[Script]:
    """The scripts of a folder, the likeliest first."""
    found = []
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(("test_", "_")) or path.name in _SKIP or not path.is_file():
            continue
        try:
            found.append(look(path))
        except Unreadable:
            continue
    return sorted(found, key=lambda script: (-script.score, script.path.name))
