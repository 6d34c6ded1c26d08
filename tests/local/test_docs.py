"""Every command in README.md and docs/ is run here, page by page, and has to print what the page shows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.objects.run_objects import render
from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.backends.kubernetes.payload.prepare import prepare
from paceline.cli.app import VERBS
from paceline.job import JobError, load, schema
from support import person, typed
from support.pages import (
    ON_A_CLUSTER,
    PAGES,
    ROOT,
    Reader,
    blocks,
    commands,
    follow,
    missing,
    new_reader,
    speaker,
    unexpected,
)
from support.stores.servers import Store, make_container

pytestmark = pytest.mark.timeout(900)  # a page has up to 30 commands

DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("examples/*/README.md"))]

# Commands that no test of a page runs, and why.
EXCEPTIONS = {
    "make demo": "sets up an environment from the package index; test_the_demo runs what its target runs after that",
    "make test": "runs the tests, this one among them",
}
LANGUAGES = {"console", "dockerfile", "python", "yaml"}
WITH_BUCKETS = ROOT / "docs" / "snapshots.md"
BUCKET, CONTAINER, KEY = "my-bucket", "my-container", "key.json"  # their names on that page
WRONG = "wrong.yaml"  # a job file with mistakes, which a page shows
RECIPES = ROOT / "docs" / "from-other-recipes.md"
# The job files of that page, and the example that each belongs to.
EXAMPLES = {
    "translate.yaml": "translate", "mnist.yaml": "mnist-loop", "chart.yaml": "contract", "resnet.yaml": "resnet-ps",
}  # fmt: skip
# What users of the recipe look for: its parameters, and the commands that they had to type.
SEARCH_TERMS = {
    "translate.yaml": (
        "local_batch_size worker_count replicas cloud_storage_bucket_name cloud_storage_upload_folder image "
        "nvidia.com/gpu terminationGracePeriodSeconds gcp-access-key.json tensorflow-training "
        "daemonset-preloaded.yaml enable-view-role.yaml stateful-set.yaml test.py docker"
    ),
    "mnist.yaml": (
        "name image worker_replicas script keras_mnist.py custom_training_mnist.py your_own_training_example.py "
        "model_checkpoint_dir checkpoint_pvc_name port create_pvc_checkpoint create_volume_inspector deploy log_dir "
        "data_dir model_dir batch_size epochs run_tensorboard render_template.py use-context exec describe logs"
    ),
    "chart.yaml": (
        "storage repo name dockerTag dockerTagCpu dockerTagGpu internalPort externalPort type dataset isGpu "
        "nbGpuPerNode ps worker tfCluster.deploy evaluating tensorboard serving dataLoader CLUSTER_CONFIG POD_NAME "
        "helm tensorflow-cluster-config cluster-service.yaml batch_size data_dir train_dir job_name task_id "
        "ps_hosts worker_hosts subset DATASET DATA_DIR alpha.kubernetes.io/nvidia-gpu"
    ),
    "resnet.yaml": (
        "name image worker_replicas ps_replicas num_gpus_per_worker has_coordinator has_eval has_tensorboard script "
        "train_log_dir cmdline_args credential_secret_json credential_secret_key port use_node_port data_dir "
        "checkpoint_dir gcloud gsutil docker render_template.py service-accounts roles/storage.admin "
        "containerregistry configure-docker cifar10_download_and_extract.py"
    ),
}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    environment = person.environment(tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache"))
    page_reader = new_reader(tmp_path, {name: value for name, value in environment.items() if name != "VIRTUAL_ENV"})
    with person.nothing_left(page_reader.home):
        yield page_reader


def pages_with_commands() -> list[Path]:
    """All pages with commands except the one that needs a cluster, which tests/cluster follows."""
    pages = [page for page in PAGES if any(block.language == "console" for block in blocks(page))]
    return [page for page in pages if page != ON_A_CLUSTER]


PLAIN_PAGES = [page for page in pages_with_commands() if page not in (WITH_BUCKETS, RECIPES)]


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, reader: Reader) -> None:
    follow(page, reader, EXCEPTIONS)


def test_the_commands_of_the_page_that_needs_buckets_do_what_it_says(
    reader: Reader, s3: Store, gcs: Store, azure: Store
) -> None:
    """With the credentials in the environment, as the page says."""
    for store in (s3, gcs):
        (store.servers[0].log.parent / "objects" / BUCKET).mkdir(exist_ok=True)  # each folder there is a bucket
    make_container(azure.servers[0].port, azure.options["AZURE_STORAGE_ACCOUNT_KEY"], CONTAINER)
    google = gcs.options
    (reader.folder / KEY).write_text(google.pop("GOOGLE_SERVICE_ACCOUNT_KEY"))
    google["GOOGLE_APPLICATION_CREDENTIALS"] = KEY
    reader.environment.update({**s3.options, **google, **azure.options})
    follow(WITH_BUCKETS, reader, EXCEPTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_job_files_of_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    """On this machine or on a cluster: some locations exist only on one of them."""
    files = [block for block in blocks(page) if block.file and page != RECIPES]
    for block in files:
        (tmp_path / block.file).write_text(block.text)
        if block.language == "yaml" and block.file != WRONG:
            check_job(tmp_path / block.file)


def check_job(job: Path) -> None:
    try:
        load(job)
    except JobError as local_error:
        try:
            load(job, cluster=True)
        except JobError as cluster_error:
            raise AssertionError(f"{job.name}: here {local_error}; on a cluster {cluster_error}") from None


def recipes() -> dict[str, str]:
    """The sections of the page about other recipes, by the name of their job file."""
    sections = re.split(r"^(?=## )", RECIPES.read_text(), flags=re.M)[1:]
    return {re.findall(r"^`(\w+\.yaml)`:$", section, re.M)[0]: section for section in sections}


def test_each_recipe_has_a_section() -> None:
    assert recipes().keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_works_as_written(name: str, reader: Reader) -> None:
    """In the folder of its example: the commands, the job file, and what to write or type instead of the recipe."""
    example = ROOT / "examples" / EXAMPLES[name]
    section = recipes()[name]
    assert f"](../examples/{example.name})" in section
    for program in example.glob("*.py"):
        shutil.copy(program, reader.folder)
    (reader.folder / "part.md").write_text(section)
    follow(reader.folder / "part.md", reader, EXCEPTIONS)
    job = reader.folder / name
    prepared = prepare(load(job, cluster=True))
    objects = render(prepared.plan, "recipe-3f9a", agent_archive(), prepared.code, library=prepared.library)
    assert sum(each["kind"] == "Job" for each in objects) == 1 + len(list(names.pools(prepared.plan)))
    first_column = "\n".join(re.findall(r"^\|(.+?)(?<!\\)\|", section, re.M))
    assert [
        each for each in SEARCH_TERMS[name].split() if not re.search(rf"(?<!\w){re.escape(each)}(?!\w)", first_column)
    ] == []
    if name == next(iter(EXAMPLES)):
        section = RECIPES.read_text().partition("\n## ")[0] + section  # what all recipes share
    for cell in replacements(section):
        load(job, check_replacement(cell, job.parent), cluster=True)


def replacements(section: str) -> Iterator[list[str]]:
    """The code in the last column of each table row."""
    for row in re.findall(r"^\|(.+)\|$", section, re.M):
        last = re.split(r"(?<!\\)\|", row)[-1]
        yield [span.replace("\\|", "|") for span in re.findall(r"`([^`]+)`", last)]


def check_replacement(spans: list[str], folder: Path) -> list[str]:
    """Checks what a cell says to type and to write; returns the fields with their values, as for `--set`."""
    changes = []
    task_page = (ROOT / "docs" / "what-a-task-is-given.md").read_text()
    for span in spans:
        assert all(f"`{name}`" in task_page for name in re.findall(r"\bPACELINE_\w+", span)), span
        command = span.partition(" | ")[0]
        if command.startswith("paceline "):
            arguments = typed.read(command)
            for file in ("".join(arguments.get("job") or ()), arguments.get("script") or ""):
                assert not file or (folder / file).exists() or file == "job.yaml", f"{span}: there is no {file}"
            continue
        field, colon, value = span.partition(": ")
        if span.startswith("--") or field == "command":
            programs = "".join(path.read_text() for path in ROOT.glob("examples/*/*.py"))
            options = typed.options() | set(re.findall(r'"(--[\w-]+)"', programs))
            assert set(re.findall(r"--[\w-]+", span)) <= options, span
        is_field = re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", field) and not re.search(r"\.(py|yaml|json)$", field)
        if not is_field or ("." not in field and field not in schema()["properties"]):
            continue
        assert schema_has(schema(), field.split(".")), f"there is no field {field}"
        if colon:
            changes.append(f"{field}={value}")
    return changes


def schema_has(node: Mapping[str, Any], path: list[str]) -> bool:
    """Whether the schema of job files has this field."""
    if "$ref" in node:
        return schema_has(schema()["$defs"][node["$ref"].rpartition("/")[2]], path)
    below = node.get("properties", {})
    return (
        not path
        or (path[0] in below and schema_has(below[path[0]], path[1:]))
        or any(schema_has(each, path) for each in node.get("anyOf", []))
    )


def picture(name: str) -> list[str]:
    """The terminal lines in a picture."""
    texts = ElementTree.parse(ROOT / "docs" / "images" / name).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in texts]


def test_the_demo(reader: Reader) -> None:
    """What `make demo` runs once its environment exists; README has a picture of it."""
    recipe = re.search(r"^demo:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    [command] = [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]
    assert command.startswith("paceline run ")
    result = reader.type(command, ROOT)
    assert result.returncode == 0, result.stdout
    picture_lines = [
        line for line in picture("demo.svg") if speaker(line) not in ("", "*") and not line.endswith("| ...")
    ]
    assert len(picture_lines) >= 8
    expected = tuple(re.sub(r"\d+\.\d%", "...%", line) for line in picture_lines)
    # Which snapshots the evaluator gets first depends on how long it takes to start.
    expected = tuple(re.sub(r"^(evaluator-0 \| step) [12]00", r"\1 ...", line) for line in expected)
    assert not missing(expected, result.stdout), f"{missing(expected, result.stdout)} not in:\n{result.stdout}"
    assert [line for line in result.stdout.splitlines() if "absl" in line or ".cc:" in line] == []
    [report] = reader.reports()
    assert (report["status"], report["restarts"]) == ("succeeded", [])
    metrics = report["metrics"]
    assert isinstance(metrics, dict) and metrics["evaluator-0"]["accuracy"] >= 0.95


@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax", "none"])
def test_the_page_lists_every_variable_that_a_task_gets(framework: str, reader: Reader) -> None:
    result = reader.type(f"paceline run --framework {framework} -- env")
    assert result.returncode == 0, result.stdout
    variables = set(re.findall(r"^worker-0 \| (\w+)=", result.stdout, re.M)) - reader.environment.keys()
    variables -= {"LC_CTYPE", "_", "PWD", "SHLVL"}  # set by Python if the locale is C, and by the shell
    assert {"PACELINE_TASK", "PACELINE_RESTORE"} <= variables
    page = (ROOT / "docs" / "what-a-task-is-given.md").read_text()
    assert [name for name in sorted(variables) if f"`{name}`" not in page] == []


def test_every_cause_and_every_verb_has_a_row() -> None:
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text())
    ended = next(one for one in schema["oneOf"] if one["properties"]["event"]["const"] == "run-ended")
    failures, index = ((ROOT / "docs" / name).read_text() for name in ("failures.md", "index.md"))
    assert [c for c in ended["properties"]["cause"]["enum"] if c and f"\n| `{c}` |" not in failures] == []
    assert [verb for verb in VERBS if f"\n| `paceline {verb}" not in index] == []


def test_no_command_hides_from_these_tests() -> None:
    page_commands = {command.words for page in pages_with_commands() for block in blocks(page)
                     if block.language == "console" for command in commands(block)}  # fmt: skip
    assert EXCEPTIONS.keys() <= page_commands, "an exception that no page shows any more"
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: write commands as `console`"
            if block.language != "console":
                assert not re.search(r"^\$ ", block.text, re.M), f"{page.name}:{block.line}: a command"


def test_links_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in DOCUMENTS:
        text = page.read_text()
        assert set(re.findall(r"\bmake\s([\w-]+)`", text)) <= targets, page.name
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, f"{page.name}: {link}"


def test_comparison_of_shown_and_printed_lines() -> None:
    printed = "worker-1 | b 1\n* generation 1 starts\nworker-0 | a\ndigits-0a1b succeeded after 1 min 2 s\n* restart\n"
    assert missing(("worker-0 | a", "worker-1 | b ...", "* generation 1 starts", "* restart"), printed) == []
    assert missing(("digits-3f9a succeeded after 29 s",), printed) == []
    assert missing(("digits-3f9a failed after 29 s",), printed) == ["digits-3f9a failed after 29 s"]
    assert missing(("* restart", "* generation 1 starts"), printed) == ["* generation 1 starts"]
    assert missing(("worker-1 | b 2", "...", ""), printed) == ["worker-1 | b 2"]
    assert missing(("line-3597  300  19 s  18 s",), "line-0a1b  300  8 s  7.4 s\n") == []
    assert unexpected(("* generation 1 starts", "* restart"), printed) == []
    assert unexpected(("* generation 1 starts",), printed) == ["* restart"]
    assert unexpected(("* restart",), printed) == ["* generation 1 starts"]
    assert unexpected(("...", "* restart"), printed) == unexpected(("* generation 1 starts", "..."), printed) == []
    assert missing(("snapshots step 3 committed",), "snapshots  1 skipped, step 3 committed") == []
    assert missing(("800 steps, 67.2 steps/s, 1 generation",), "  800 steps, 9 steps/s, 1 generation\n") == []
