"""Any input results in a plan or a clear error: 1,000 examples, mostly invalid jobs; 2,500 in `make test-long`."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from paceline import job, plan
from paceline.job import planning
from paceline.job.kubernetes_section import ITEMS, Credentials, Kubernetes
from paceline.job.schema_models import HostPool, Job, Limits, Restart
from paceline.job.yaml_writer import write

pytestmark = pytest.mark.generated


def examples(percent: int) -> settings:
    """So many, in percent of the number that the profile sets: see tests/conftest.py."""
    count = settings.default.max_examples * percent // 100
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))


PARAMETER_SERVER = {
    "name": "a",
    "framework": "tensorflow",
    "strategy": "parameter-server",
    "roles": {
        "chief": {"command": ["python", "train.py"]},
        "worker": [{"replicas": 2}, {"replicas": 1, "gpus": 2}],
        "ps": {"replicas": 2, "env": {"A": "b"}},
        "evaluator": {"command": ["python", "train.py", "--eval"]},
    },
    "kubernetes": {"image": "a:b", "namespace": "c"},
}
MULTI_WORKER = {
    "name": "digits",
    "framework": "tensorflow",
    "command": ["python", "train.py", "--epochs", "20"],
    "roles": {"worker": {"replicas": 3, "gpus": 1, "cpu": 4, "memory": "8Gi"}, "evaluator": {"tasks_per_host": 1}},
    "restart": {"limit": 10, "hang_after": "10m", "warm": True},
    "limits": {"start": "30m", "runtime": "6h", "grace": 30},
}
SMALL = {"name": "s", "framework": "torch", "command": ["python", "-m", "pkg.train"], "code": "."}
CLUSTER = {
    **SMALL,
    "code": "image",
    "tensorboard": True,
    "credentials": {"secret": "a", "file": "b.json"},
    "limits": {"keep_finished": "1h"},
    "kubernetes": {
        "image": "a:b",
        "user": "cluster",
        "gpu_resource": "nvidia.com/gpu",
        "image_pull_secrets": ["a"],
        "node_selector": {"a/b": "c"},
        "tolerations": [{"key": "a", "effect": "NoExecute", "seconds": 3}, {"operator": "Exists"}],
        "affinity": {"nodeAffinity": {"a": [{"b": 1}]}},
        "volumes": [{"mount": "/a", "claim": "b"}, {"name": "c", "mount": "/d", "empty": "1Gi", "read_only": True}],
        "env_from": [{"secret": "a", "prefix": "A_"}],
        "labels": {"a": "b"},
        "annotations": {"a": "b"},
        "work": "/app",
        "pod": {"a": None, "b": {"c": [1, "d"]}},
    },
}
JOBS: list[dict[str, Any]] = [
    PARAMETER_SERVER,
    MULTI_WORKER,
    SMALL,
    {**SMALL, "framework": "none", "env": {"X": "1"}, "cpu": "500m"},
    CLUSTER,
]

MODELS: tuple[type[BaseModel], ...] = (Job, HostPool, Limits, Restart, Credentials, Kubernetes, *ITEMS.values())
KEYS = sorted({name for model in MODELS for name in model.model_fields})
WORDS = [*KEYS, "chief", "worker", "ps", "evaluator", "tensorflow", "torch", "jax", "none", "parameter-server", "a"]
WORDS += ["python", "train.py", "8Gi", "10m", "500m", "", "yes", "0", "replics", "PATH", "RANK", "..", "image", "a/b"]
WORDS += ["cluster", "/data", "/paceline", "Exists", "NoExecute", "spread", "host_path", "hostPath", "<<", "[key]"]
words = st.sampled_from(WORDS)
numbers = st.sampled_from([0, 1, 2, 3, -1, 7, 64, 100_001, 10**30, 0.5, -0.0, 1e300, float("inf"), float("nan")])
scalars = st.one_of(st.none(), st.booleans(), numbers, words, st.text(max_size=12))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text("")
        (Path(directory) / "pkg").mkdir()
        for name in ("__init__", "train"):
            (Path(directory) / "pkg" / f"{name}.py").write_text("")
        yield Path(directory)


def check_load(text: str, folder: Path, overrides: Sequence[str] = ()) -> bool:
    """Return whether the text is a valid job. Fail unless loading ends in a plan or a readable error."""
    try:
        loaded = job.load_text(text, "job.yaml", folder, overrides)
    except job.JobError as error:
        assert error.problems and all(problem.message for problem in error.problems)
        assert str(error).strip() and all(line.isprintable() for line in str(error).split("\n"))
        return False
    plan_json = plan.to_json(planning.make_plan(loaded.job))
    assert plan.to_json(planning.make_plan(loaded.job)) == plan_json
    reloaded = job.load_text(loaded.text, "job.yaml", folder)
    assert plan.to_json(planning.make_plan(reloaded.job)) == plan_json
    return True


def paths(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [prefix, *(path for key, value in inner for path in paths(value, (*prefix, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A job with up to three changes: a value replaced, removed, added or renamed."""
    data: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(JOBS)))
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(paths(data)[1:] or [("name",)]))
        parent: Any = data
        for step in path[:-1]:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "remove", "add", "rename"]))
        if change == "replace" or isinstance(parent, list):
            parent[path[-1]] = draw(anything)
        elif change == "remove":
            parent.pop(path[-1], None)
        elif change == "add":
            parent[draw(words | st.text(max_size=8))] = draw(anything)
        else:
            parent[draw(words)] = parent.pop(path[-1], None)
    return data


def optional_fields(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


times = st.sampled_from(["90s", "1h30m", "2d", "0.5h", 1, 0.25, 86400])
sizes = {
    "gpus": st.integers(0, 3),
    "cpu": st.sampled_from([1, 0.5, "500m", "2", "1.5"]),
    "memory": st.sampled_from(["8Gi", "512Mi", "1.5G", 2**20, "2000000k"]),
}
letters = st.characters(codec="utf-8", exclude_characters="\0")
variables = st.dictionaries(
    st.from_regex(r"[A-Z][A-Z0-9_]{0,5}x", fullmatch=True), st.text(letters, max_size=8), max_size=3
)
groups = optional_fields(replicas=st.integers(1, 4), tasks_per_host=st.integers(1, 3), **sizes)
hosts = groups | st.lists(groups, min_size=1, max_size=3)
command = st.lists(st.text(letters, min_size=1, max_size=8), max_size=3).map(lambda more: ["python", "train.py", *more])
names = st.sampled_from(["a", "0", "a.b-c", "x" * 253])
keys = st.sampled_from(["a", "B_c.d", "kubernetes.io/arch", "example.com/A-b", "null", "0", "true"])
labels = st.dictionaries(keys, st.sampled_from(["", "a", "1", "true", "A_b.c-d", "1e3"]), max_size=3)
printable = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=6)
finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | st.text(letters, max_size=8)
patches = st.dictionaries(
    printable.map("x".__add__),
    st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.lists(inner.filter(lambda item: item is not None), max_size=3)
            | st.dictionaries(printable, inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)
sources = st.one_of(
    *(st.fixed_dictionaries({kind: names}) for kind in ("claim", "secret", "config_map")),
    st.fixed_dictionaries({"empty": sizes["memory"]}, optional={"read_only": st.booleans()}),
)
volumes = st.lists(sources, max_size=3).map(
    lambda items: [{"mount": f"/mnt/{number}/", **source} for number, source in enumerate(items)]
)
tolerations = st.one_of(
    st.fixed_dictionaries({"key": keys}, optional={"value": st.just("a"), "effect": st.just("NoSchedule")}),
    st.fixed_dictionaries(
        {"operator": st.just("Exists"), "effect": st.just("NoExecute"), "seconds": st.integers(0, 9)}
    ),
)
other_fields = optional_fields(
    env=variables,
    code=st.sampled_from([".", "./pkg/..", "image"]),
    tensorboard=st.booleans()
    | optional_fields(image=st.just("a/b"), ingress=optional_fields(tls=names).map(lambda tls: {"host": "a.b", **tls})),
    export=st.just({"command": ["python", "train.py"]}),
    credentials=st.fixed_dictionaries({"secret": names, "file": st.sampled_from(["a", ".b", "c_D.json"])}),
    restart=optional_fields(limit=st.integers(0, 20), hang_after=times, warm=st.booleans()),
    limits=optional_fields(start=times, runtime=times, grace=times, keep_finished=times),
    kubernetes=optional_fields(
        image=st.just("a/b:c"),
        namespace=st.just("1a"),
        context=st.text(letters, max_size=4).map("c".__add__),
        user=st.integers(1, 2**31 - 1) | st.just("cluster"),
        image_pull_secrets=st.lists(names, max_size=2),
        service_account=names,
        node_selector=labels,
        tolerations=st.lists(tolerations, max_size=3),
        placement=st.sampled_from(["spread", "pack"]),
        volumes=volumes,
        env_from=st.lists(st.fixed_dictionaries({"secret": names}, optional={"prefix": st.just("A_")}), max_size=2),
        labels=labels,
        annotations=st.dictionaries(keys, st.text(letters, max_size=8), max_size=3),
        work=st.sampled_from(["/app", "/a b/c/", "/paceline/work/x"]),
        pod=patches,
    ),
    **sizes,
)
chief = st.fixed_dictionaries({"tasks_per_host": st.just(1)}, optional={"env": variables})
valid_jobs = st.one_of(
    st.fixed_dictionaries(
        {"framework": st.sampled_from(["torch", "jax", "none"])},
        optional={"roles": st.fixed_dictionaries({"worker": hosts})},
    ),
    st.fixed_dictionaries(
        {"framework": st.just("tensorflow")},
        optional={
            "strategy": st.just("multi-worker"),
            "roles": st.fixed_dictionaries({"worker": hosts}, optional={"chief": chief, "evaluator": hosts}),
        },
    ),
    st.fixed_dictionaries(
        {
            "framework": st.just("tensorflow"),
            "strategy": st.just("parameter-server"),
            "roles": st.fixed_dictionaries(
                {"worker": hosts, "ps": hosts}, optional={"chief": chief, "evaluator": hosts}
            ),
        }
    ),
)


def test_the_unchanged_jobs_are_valid(folder: Path) -> None:
    for data in JOBS:
        assert check_load(write(data), folder)


@examples(350)
@given(data=mutated())
def test_changed_jobs(data: dict[str, Any], folder: Path) -> None:
    check_load(json.dumps(data), folder)


@examples(150)
@given(kind=valid_jobs, other_fields=other_fields, command=command, as_json=st.booleans())
def test_valid_jobs(
    kind: dict[str, Any], other_fields: dict[str, Any], command: list[str], as_json: bool, folder: Path
) -> None:
    data = {"name": "right", "command": command, **kind, **other_fields}
    assert check_load(json.dumps(data) if as_json else write(data), folder)


@examples(150)
@given(
    data=st.sampled_from(JOBS),
    overrides=st.lists(
        st.builds(
            lambda steps, value: f"{'.'.join(steps)}={value}",
            st.lists(words | st.sampled_from(["0", "1"]), min_size=1, max_size=4),
            words | st.sampled_from(["{a: b}", "[python, train.py]", "{replicas: 2}", "[", "&a *a", "3", "0", "1.5"]),
        )
        | st.text(max_size=20),
        min_size=1,
        max_size=3,
    ),
)
def test_overrides(data: dict[str, Any], overrides: list[str], folder: Path) -> None:
    check_load(write(data), folder, overrides)


PIECES = ["name: a\n", "framework: torch\n", "command: [python, train.py]\n", "roles:\n", "  worker: {replicas: 2}\n"]
SIGNS = [
    "- ",
    ": ",
    "? ",
    "{",
    "}",
    "[",
    "]",
    ", ",
    "&a ",
    "*a",
    "<<: ",
    "!!set ",
    "!",
    "|\n",
    ">\n",
    "'",
    '"',
    "#",
    "%",
    "@",
]
SPACES = [
    "\n",
    "\t",
    "  ",
    "\r\n",
    "\ufeff",
    "\x00",
    "---\n",
    "...\n",
    "~",
    "\\",
    '"\\x',
    '"\\U00110000"',
    "1e3",
    "\u2028",
]


@examples(150)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.sampled_from(SIGNS) | st.sampled_from(SPACES) | words, max_size=25))
def test_pieces_of_yaml_in_any_order(pieces: list[str], folder: Path) -> None:
    check_load("".join(pieces), folder)


@examples(100)
@given(data=st.sampled_from(JOBS), position=st.floats(0, 1), cut=st.integers(0, 12), inserted=st.text(max_size=6))
def test_text_damaged_at_one_position(
    data: dict[str, Any], position: float, cut: int, inserted: str, folder: Path
) -> None:
    text = write(data)
    start = int(position * len(text))
    check_load(text[:start] + inserted + text[start + cut :], folder)


@examples(50)
@given(text=st.text(max_size=200))
def test_any_text(text: str, folder: Path) -> None:
    check_load(text, folder)


@examples(50)
@given(content=st.binary(max_size=200), start=st.sampled_from([b"", b"name: a\n", b"\xff\xfe", b"\xef\xbb\xbf"]))
def test_any_bytes(content: bytes, start: bytes, folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_bytes(start + content)
    try:
        job.load(path)
    except job.JobError as error:
        assert error.problems and str(error).strip()
