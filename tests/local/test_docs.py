"""Every command that README.md and docs/ show is run here, page by page, and has to print what the page says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import person
import pytest

from paceline.cli.app import VERBS
from paceline.job import JobError, load
from pages import ON_A_CLUSTER, PAGES, ROOT, Reader, blocks, commands, follow, missing, new_reader, unexpected
from stores.servers import Store, make_container

WRITTEN = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/digits/README.md"))]

# Commands that no page test runs, and who runs them instead.
EXCEPTIONS = {
    "make demo": "sets up an environment from the package index; test_the_demo runs what its target runs after that",
    "make test": "runs the tests, this one among them",
}
LANGUAGES = {"console", "dockerfile", "python", "yaml"}
WITH_BUCKETS = ROOT / "docs" / "snapshots.md"
BUCKET, CONTAINER, KEY = "my-bucket", "my-container", "key.json"  # what that page calls them
WRONG = "wrong.yaml"  # a job file that a page shows for its mistakes


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


@pytest.mark.parametrize("page", [page for page in with_commands() if page != WITH_BUCKETS], ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, reader: Reader) -> None:
    beside(page, reader.folder)
    follow(page, reader, EXCEPTIONS)


def beside(page: Path, folder: Path) -> None:
    """The programs that the job files of a page name, where they are those of an example."""
    if page.stem == "from-other-recipes":
        for program in (ROOT / "examples/translate").glob("*.py"):
            shutil.copy(program, folder)


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
    shown = [block for block in blocks(page) if block.file]
    beside(page, tmp_path)
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
    given -= {"LC_CTYPE", "_"}  # set by Python where the locale is C, and by the shell that typed the command
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
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for page in WRITTEN:
        text = page.read_text()
        assert set(re.findall(r"\bmake (\w+)`", text)) <= targets, page.name
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
