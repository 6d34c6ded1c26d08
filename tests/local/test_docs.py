"""Every command that README.md and docs/ show is run here, page by page, and has to print what the page says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.kubernetes import names
from paceline.backends.kubernetes.archive import agent_archive
from paceline.backends.kubernetes.prepare import prepare
from paceline.backends.kubernetes.render import render
from paceline.cli.app import VERBS
from paceline.job import JobError, load, schema
from support import person, typed
from support.pages import ON_A_CLUSTER, PAGES, ROOT, Reader, blocks, commands, follow, missing, new_reader, unexpected
from support.stores.servers import Store, make_container

WRITTEN = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("examples/*/README.md"))]

# Commands that no page test runs, and who runs them instead.
EXCEPTIONS = {
    "make demo": "sets up an environment from the package index; test_the_demo runs what its target runs after that",
    "make test": "runs the tests, this one among them",
}
LANGUAGES = {"console", "dockerfile", "python", "yaml"}
WITH_BUCKETS = ROOT / "docs" / "snapshots.md"
BUCKET, CONTAINER, KEY = "my-bucket", "my-container", "key.json"  # what that page calls them
WRONG = "wrong.yaml"  # a job file that a page shows for its mistakes
RECIPES = ROOT / "docs" / "from-other-recipes.md"
# Its job files, and the example that each stands in.
PLACES = {
    "translate.yaml": "translate", "mnist.yaml": "mnist-loop", "chart.yaml": "contract", "resnet.yaml": "resnet-ps",
}  # fmt: skip
# What a person who used the recipe looks for: its parameters, and what it had people type.
LOOKED_FOR = {
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
    given = person.environment(tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache"))
    made = new_reader(tmp_path, {name: value for name, value in given.items() if name != "VIRTUAL_ENV"})
    with person.nothing_left(made.home):
        yield made


def with_commands() -> list[Path]:
    """All but the page that needs a cluster, which tests/cluster follows."""
    shown = [page for page in PAGES if any(block.language == "console" for block in blocks(page))]
    return [page for page in shown if page != ON_A_CLUSTER]


ALIKE = [page for page in with_commands() if page not in (WITH_BUCKETS, RECIPES)]


@pytest.mark.parametrize("page", ALIKE, ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, reader: Reader) -> None:
    follow(page, reader, EXCEPTIONS)


def test_so_does_the_page_that_needs_buckets(reader: Reader, s3: Store, gcs: Store, azure: Store) -> None:
    """With the credentials in the environment, where the page says they are."""
    for store in (s3, gcs):
        (store.servers[0].log.parent / "objects" / BUCKET).mkdir(exist_ok=True)  # a folder there is a bucket
    make_container(azure.servers[0].port, azure.options["AZURE_STORAGE_ACCOUNT_KEY"], CONTAINER)
    google = gcs.options
    (reader.folder / KEY).write_text(google.pop("GOOGLE_SERVICE_ACCOUNT_KEY"))
    google["GOOGLE_APPLICATION_CREDENTIALS"] = KEY
    reader.environment.update({**s3.options, **google, **azure.options})
    follow(WITH_BUCKETS, reader, EXCEPTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_job_files_of_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    """On this machine, or on a cluster: some places are on one of them alone."""
    shown = [block for block in blocks(page) if block.file and page != RECIPES]
    for block in shown:
        (tmp_path / block.file).write_text(block.text)
        if block.language == "yaml" and block.file != WRONG:
            valid(tmp_path / block.file)


def valid(job: Path) -> None:
    try:
        load(job)
    except JobError as here:
        try:
            load(job, cluster=True)
        except JobError as there:
            raise AssertionError(f"{job.name}: here {here}; on a cluster {there}") from None


def recipes() -> dict[str, str]:
    """The parts of the page for people who come from other recipes, by the job file that each has."""
    parts = re.split(r"^(?=## )", RECIPES.read_text(), flags=re.M)[1:]
    return {re.findall(r"^`(\w+\.yaml)`:$", part, re.M)[0]: part for part in parts}


def test_each_recipe_has_its_part() -> None:
    assert recipes().keys() == PLACES.keys()


@pytest.mark.parametrize("name", PLACES)
def test_a_recipe_is_followed_word_by_word(name: str, reader: Reader) -> None:
    """In the folder of its example: commands, job file, and what to write and to type for each thing of the recipe."""
    example = ROOT / "examples" / PLACES[name]
    part = recipes()[name]
    assert f"](../examples/{example.name})" in part
    for program in example.glob("*.py"):
        shutil.copy(program, reader.folder)
    (reader.folder / "part.md").write_text(part)
    follow(reader.folder / "part.md", reader, EXCEPTIONS)
    job = reader.folder / name
    prepared = prepare(load(job, cluster=True))
    made = render(prepared.plan, "recipe-3f9a", agent_archive(), prepared.code, library=prepared.library)
    assert sum(each["kind"] == "Job" for each in made) == 1 + len(list(names.groups(prepared.plan)))
    first = "\n".join(re.findall(r"^\|(.+?)(?<!\\)\|", part, re.M))
    assert [each for each in LOOKED_FOR[name].split() if not re.search(rf"(?<!\w){re.escape(each)}(?!\w)", first)] == []
    if name == next(iter(PLACES)):
        part = RECIPES.read_text().partition("\n## ")[0] + part  # what all recipes share
    for cell in instead(part):
        load(job, tried(cell, job.parent), cluster=True)


def instead(part: str) -> Iterator[list[str]]:
    """What the last column of each row of its tables has in backquotes."""
    for row in re.findall(r"^\|(.+)\|$", part, re.M):
        last = re.split(r"(?<!\\)\|", row)[-1]
        yield [span.replace("\\|", "|") for span in re.findall(r"`([^`]+)`", last)]


def tried(spans: list[str], folder: Path) -> list[str]:
    """Looks at what a cell says to type and to write, and gives the fields with their values, as for `--set`."""
    changes = []
    given_to_tasks = (ROOT / "docs" / "what-a-task-is-given.md").read_text()
    for span in spans:
        assert all(f"`{name}`" in given_to_tasks for name in re.findall(r"\bPACELINE_\w+", span)), span
        words = span.partition(" | ")[0]
        if words.startswith("paceline "):
            given = typed.read(words)
            for file in ("".join(given.get("job") or ()), given.get("script") or ""):
                assert not file or (folder / file).exists() or file == "job.yaml", f"{span}: there is no {file}"
            continue
        field, colon, value = span.partition(": ")
        if span.startswith("--") or field == "command":
            of_programs = "".join(path.read_text() for path in ROOT.glob("examples/*/*.py"))
            known = typed.options() | set(re.findall(r'"(--[\w-]+)"', of_programs))
            assert set(re.findall(r"--[\w-]+", span)) <= known, span
        is_field = re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", field) and not re.search(r"\.(py|yaml|json)$", field)
        if not is_field or ("." not in field and field not in schema()["properties"]):
            continue
        assert has(schema(), field.split(".")), f"there is no field {field}"
        if colon:
            changes.append(f"{field}={value}")
    return changes


def has(node: Mapping[str, Any], path: list[str]) -> bool:
    """Whether a job file may have this field, by its schema."""
    if "$ref" in node:
        return has(schema()["$defs"][node["$ref"].rpartition("/")[2]], path)
    below = node.get("properties", {})
    return (
        not path
        or (path[0] in below and has(below[path[0]], path[1:]))
        or any(has(each, path) for each in node.get("anyOf", []))
    )


def test_the_demo(reader: Reader) -> None:
    """What `make demo` runs, once its environment is there; README shows what it prints."""
    recipe = re.search(r"^demo:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    [words] = [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]
    assert words.startswith("paceline run ")
    done = reader.type(words, ROOT)
    assert done.returncode == 0, done.stdout
    [shown] = [c.shown for b in blocks(ROOT / "README.md") if b.language == "console" for c in commands(b)
               if c.words == "make demo"]  # fmt: skip
    digits = tuple(re.sub(r"\d+\.\d%", "...%", line) for line in shown)
    # Which snapshot it sees first depends on how long it takes to start.
    digits = tuple(re.sub(r"^(evaluator-0 \| step) 100", r"\1 ...", line) for line in digits)
    assert not missing(digits, done.stdout), f"{missing(digits, done.stdout)} not in:\n{done.stdout}"
    [report] = reader.reports()
    assert (report["status"], report["restarts"]) == ("succeeded", [])
    metrics = report["metrics"]
    assert isinstance(metrics, dict) and metrics["evaluator-0"]["accuracy"] >= 0.95


@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax", "none"])
def test_the_page_names_every_variable_that_a_task_is_given(framework: str, reader: Reader) -> None:
    done = reader.type(f"paceline run --framework {framework} -- env")
    assert done.returncode == 0, done.stdout
    given = set(re.findall(r"^worker-0 \| (\w+)=", done.stdout, re.M)) - reader.environment.keys()
    given -= {"LC_CTYPE", "_", "PWD", "SHLVL"}  # by Python where the locale is C, and by the shell that typed it
    assert {"PACELINE_TASK", "PACELINE_RESTORE"} <= given
    page = (ROOT / "docs" / "what-a-task-is-given.md").read_text()
    assert [name for name in sorted(given) if f"`{name}`" not in page] == []


def test_every_cause_and_every_verb_has_its_row() -> None:
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text())
    ended = next(one for one in schema["oneOf"] if one["properties"]["event"]["const"] == "run-ended")
    failures, index = ((ROOT / "docs" / name).read_text() for name in ("failures.md", "index.md"))
    assert [c for c in ended["properties"]["cause"]["enum"] if c and f"\n| `{c}` |" not in failures] == []
    assert [verb for verb in VERBS if f"\n| `paceline {verb}" not in index] == []


def test_no_command_hides_from_these_tests() -> None:
    shown = {command.words for page in with_commands() for block in blocks(page) if block.language == "console"
             for command in commands(block)}  # fmt: skip
    assert EXCEPTIONS.keys() <= shown, "an exception that no page shows any more"
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: write commands as `console`"
            if block.language != "console":
                assert not re.search(r"^\$ ", block.text, re.M), f"{page.name}:{block.line}: a command"


def test_links_lead_somewhere_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in WRITTEN:
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


def test_what_counts_as_shown_and_printed() -> None:
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
