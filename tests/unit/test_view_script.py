"""What `paceline init` detects in a script, and that the job file it writes is valid."""

from pathlib import Path

import pytest

from paceline.job.script_inspection import UnreadableScript, candidates, inspect_script
from support.recorded import call

CASES = {
    "tf multi-worker": (
        "import tensorflow as tf\ns = tf.distribute.MultiWorkerMirroredStrategy()",
        ("tensorflow", "multi-worker", False, False, True),
    ),
    "tf experimental": (
        "from tensorflow.distribute.experimental import MultiWorkerMirroredStrategy as M",
        ("tensorflow", "multi-worker", False, False, True),
    ),
    "tf evaluator": (
        "import tensorflow as tf\nif kind == 'evaluator': pass\ntf.distribute.MultiWorkerMirroredStrategy()",
        ("tensorflow", "multi-worker", False, True, True),
    ),
    "tf parameter server": (
        "import tensorflow as tf\ntf.distribute.ParameterServerStrategy(r)",
        ("tensorflow", "parameter-server", True, False, True),
    ),
    "CLUSTER_CONFIG": (
        "import os, tensorflow as tf\nos.environ['CLUSTER_CONFIG']\ntf.distribute.ParameterServerStrategy(r)",
        ("tensorflow", "parameter-server", False, False, True),
    ),
    "keras alone": ("import keras\nkeras.Sequential()", ("tensorflow", "multi-worker", False, False, False)),
    "keras on torch": ("import keras, torch", ("torch", None, False, False, False)),
    "torch ddp": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        ("torch", None, False, False, True),
    ),
    "torch by rank": ("import os, torch\nos.environ['RANK']", ("torch", None, False, False, True)),
    "torch alone": ("import torch", ("torch", None, False, False, False)),
    "jax": ("import jax\njax.distributed.initialize()", ("jax", None, False, False, True)),
    "jax with tf data": ("import tensorflow as tf, jax", ("jax", None, False, False, False)),
    "inside a function": ("def main():\n    import torch", ("torch", None, False, False, False)),
    "only mentioned": ("# import torch\ntext = 'import jax'", ("none", None, False, False, False)),
    "empty": ("", ("none", None, False, False, False)),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_guesses(tmp_path: Path, text: str, expected: tuple[object, ...]) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    script = inspect_script(path)
    assert (script.framework, script.strategy, script.chief, script.evaluator, script.distributed) == expected
    assert all(script.reasons)


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_the_job_file_is_valid(tmp_path: Path, text: str, expected: tuple[object, ...]) -> None:
    folder = tmp_path / "My Digits!"
    folder.mkdir()
    (folder / "train.py").write_text(text)
    result = call(tmp_path, "init", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert f"train.py: {expected[0]}" in result.stderr
    assert "wrote job.yaml; review it, then: paceline run job.yaml" in result.stderr
    assert call(tmp_path, "validate", cwd=folder).stdout.startswith("job.yaml is valid: ")


def test_a_job_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "job.yaml").write_text("mine")
    refused = call(tmp_path, "init", cwd=tmp_path)
    assert (refused.returncode, (tmp_path / "job.yaml").read_text()) == (2, "mine")
    assert refused.stderr == "error: job.yaml already exists; --force overwrites it\n"
    assert call(tmp_path, "init", "--force", cwd=tmp_path).returncode == 0
    assert "framework: torch" in (tmp_path / "job.yaml").read_text()


def test_the_likeliest_script_is_chosen(tmp_path: Path) -> None:
    for name, text in {
        "data.py": "import torch", "train.py": "import torch\ntorch.distributed.init_process_group()",
        "test_it.py": "import torch", "setup.py": "", "broken.py": "def", "plot.py": "import matplotlib",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert [script.path.name for script in candidates(tmp_path)] == ["train.py", "data.py", "plot.py"]
    result = call(tmp_path, "init", cwd=tmp_path)
    assert "chose train.py over data.py; to use another: paceline init data.py" in result.stderr


@pytest.mark.parametrize("content", [b"def", b"\xff\xfe", b"\x00", b"(" * 5000], ids=str)
def test_a_file_that_is_not_python_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with pytest.raises(UnreadableScript):
        inspect_script(path)
    result = call(tmp_path, "init", "train.py", cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
