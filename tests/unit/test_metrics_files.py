"""The dashboard, the alert rules and the page about metrics know exactly the metrics that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from paceline.agent.metrics.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "metrics" / "dashboard.json").read_text())
RULES = YAML(typ="safe").load((DOCS / "metrics" / "alerts.yaml").read_text())["groups"][0]["rules"]
LABELS = {family.sample: {"run", *family.labels} for family in FAMILIES}


def expressions(part: Any) -> Iterator[str]:
    """Every query in the dashboard."""
    if isinstance(part, dict):
        yield from (value for key, value in part.items() if key in ("expr", "definition"))
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from expressions(inner)


def unknown(expression: str) -> list[str]:
    """The metrics and labels in a query that do not exist."""
    wrong = []
    for name, _, selector in re.findall(r"(paceline_\w+)(\{([^}]*)\})?", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        wrong += [name] if name not in LABELS else sorted(f"{name}.{label}" for label in labels - LABELS[name])
    return wrong


@pytest.mark.parametrize("expression", [*expressions(DASHBOARD), *(rule["expr"] for rule in RULES)])
def test_queries_use_only_metrics_and_labels_that_exist(expression: str) -> None:
    assert "paceline_" in expression and not unknown(expression)


def test_a_wrong_query_would_be_noticed() -> None:
    assert unknown('rate(paceline_restarts{cause="hang"}[1h])') == ["paceline_restarts"]
    assert unknown('paceline_step{task="a", run="b"}') == ["paceline_step.task"]


def test_labels_in_legends_and_texts_exist() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            metric = re.search(r"paceline_\w+", target["expr"])
            assert metric and set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= LABELS[metric[0]], panel
    for rule in RULES:
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= ({"instance", "job"} if "up ==" in rule["expr"] else {"run"}), rule["alert"]


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23


def test_there_are_six_alerts_and_the_page_lists_them() -> None:
    page = (DOCS / "metrics.md").read_text()
    names = [rule["alert"] for rule in RULES]
    assert len(names) == 6 and re.findall(r"^\| `(Paceline\w+)` \|", page, re.M) == names


def test_the_page_lists_every_metric_with_its_labels() -> None:
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(paceline_\w+)` \| ([^|]*) \|", page, re.M)
    assert [name for name, _ in rows] == [family.sample for family in FAMILIES]
    for family, (_, labels) in zip(FAMILIES, rows, strict=True):
        assert re.findall(r"`(\w+)`", labels) == list(family.labels), family.name
