"""The list of metrics: names and families, groups for services, and that the code reports nothing that is not in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.track.glossary import Metric, glossary
from agentrl.track.jsonl import PROMISED

ROOT = Path(__file__).parents[3] / "agentrl"
PACKAGES = ("flow", "learner", "algo", "rollout", "engine", "evaluation", "env", "cluster", "weights")
KNOWN = glossary()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/seller", "reward/<agent>"),
        ("env/tries", "env/<name>"),
        ("eval/pass@4", "eval/pass@<k>"),
        ("eval/score_high", "eval/<figure>_high"),
        ("reward_model/rm/cut", "reward_model/<name>/cut"),
        ("eval/pass@4_low", "eval/<figure>_low"),
        ("staleness/share_3", "staleness/share_<k>"),
        ("time/layout_s", "time/<phase>_s"),
        ("entropy", "entropy"),
    ],
)
def test_a_metric_is_found_by_its_name_or_its_family(name: str, found: str) -> None:
    metric = KNOWN.find(name)
    assert metric is not None
    assert metric.name == found


def test_the_list_is_searched_once_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services ask for the same hundred names in every step, on the loop's own thread."""
    first = KNOWN.find("own/figure_s"), KNOWN.find("reward/mean")
    monkeypatch.setattr(Metric, "matches", lambda *_: pytest.fail("searched again"))
    assert (KNOWN.find("own/figure_s"), KNOWN.find("reward/mean")) == first


@pytest.mark.parametrize("name", ["mine", "staleness/other", "entropyx", "xreward/mean"])
def test_what_is_not_in_the_list_is_not_found(name: str) -> None:
    assert KNOWN.find(name) is None


def test_names_without_a_group_get_their_section() -> None:
    assert [KNOWN.grouped(name) for name in ("reward/mean", "entropy", "grad_norm", "tokens_per_s", "mine")] == [
        "reward/mean",
        "policy/entropy",
        "learner/grad_norm",
        "speed/tokens_per_s",
        "other/mine",
    ]


def test_the_list_is_consistent() -> None:
    names = [metric.name for metric in KNOWN.metrics]
    assert len(set(names)) == len(names)
    assert len(KNOWN.watch) == 6
    assert {*KNOWN.watch, *PROMISED} <= set(names)
    assert all(metric.text.endswith(".") and metric.section in KNOWN.titles for metric in KNOWN.metrics)
    assert len({KNOWN.grouped(name) for name in names}) == len(names)


def literals(tree: ast.AST) -> Iterator[str]:
    """Texts of the code, without the pieces of formatted ones."""
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            yield node.value


def test_every_metric_in_the_code_is_in_the_list() -> None:
    groups = {metric.name.partition("/")[0] for metric in KNOWN.metrics if "/" in metric.name}
    found = {
        text: path.name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for text in literals(ast.parse(path.read_text(encoding="utf-8")))
        if re.fullmatch(r"[a-z_]+(/[\w@-]+)+", text) and text.partition("/")[0] in groups
    }
    assert len(found) > 60
    unknown = {text: file for text, file in found.items() if KNOWN.find(text) is None}
    assert not unknown, f"describe these in agentrl/track/metrics.toml: {unknown}"
