"""The READMEs of the examples: each job file runs on a cluster as its page says, and each command exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.objects.run_objects import render
from paceline.backends.kubernetes.payload import prepare
from paceline.job import load
from support import typed
from support.pages import ROOT

README = "README.md"
JOBS = sorted(ROOT.glob("examples/*/*.yaml"))


def commands(page: Path) -> list[str]:
    """The `paceline` commands in the code blocks of a page."""
    blocks = re.findall(r"^```\n(.+?)^```$", page.read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").removesuffix(" &") for line in lines if re.match(r"(\$ )?paceline ", line)]


@pytest.mark.parametrize("page", sorted(ROOT.glob(f"examples/*/{README}")), ids=lambda page: page.parent.name)
def test_the_commands_of_an_example_exist(page: Path) -> None:
    assert commands(page)
    for command in commands(page):
        for job in typed.read(command).get("job") or ():
            assert (ROOT / job).is_file() or (page.parent / job).is_file(), command


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.parent.name}-{job.stem}")
def test_an_example_runs_on_a_cluster_as_its_page_says(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "library_parts", lambda: (b"obstore",))  # 5 MB that take a second to pack
    parsed = [typed.read(command) for command in commands(job.parent / README)]
    path = str(job.relative_to(ROOT))
    (arguments,) = [each for each in parsed if each.get("job") == (path,) and each["on"] == "kubernetes"]
    prepared = prepare.prepare(load(job, arguments["overrides"], cluster=True))
    objects = render(prepared.plan, "example-3f9a", b"agent", prepared.code, library=prepared.library)
    roles = {each["metadata"]["name"] for each in objects if each["kind"] == "Job"} - {"example-3f9a"}
    assert roles == {names.job_of("example-3f9a", pool) for pool in names.pools(prepared.plan)}
