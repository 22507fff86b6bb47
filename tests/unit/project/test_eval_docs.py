"""Flags, figures and exit codes on docs/eval.md are those of the commands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from agentrl.config.evaluate import EvaluateConfig
from agentrl.config.load import aliases
from agentrl.config.schema import TrainConfig
from agentrl.core.exit_codes import INCOMPLETE
from agentrl.core.settings import flag
from agentrl.evaluation.plan import EvalConfig
from agentrl.evaluation.statistics import LEVEL, RESAMPLES

PAGE = (Path(__file__).parents[3] / "docs" / "eval.md").read_text()


def flags_of(config: object) -> set[str]:
    sections = [getattr(config, section.name) for section in dataclasses.fields(config)]  # type: ignore[arg-type]
    return {flag(item.name) for section in sections for item in dataclasses.fields(section)}


def test_every_flag_exists() -> None:
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert named <= flags_of(TrainConfig()) | flags_of(EvaluateConfig()) | set(aliases(EvaluateConfig, "eval")), named
    assert {flag(item.name) for item in dataclasses.fields(EvalConfig)} <= named


def test_numbers_are_those_of_the_code() -> None:
    assert f"{LEVEL:.0%} percentile bootstrap intervals over {RESAMPLES:,} resamples" in PAGE
    assert f"episodes are played per task ({EvalConfig.eval_samples})" in PAGE
    assert f"| {INCOMPLETE} | some tasks are in no figure" in PAGE
