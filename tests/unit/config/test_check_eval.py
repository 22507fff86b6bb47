"""Settings of evaluations that would do nothing are refused with a way out."""

from __future__ import annotations

import re

import pytest

from agentrl.config.commands import load_config
from agentrl.core.errors import ConfigError

AGENT = ["--agent", "module:Name"]
EVERY = ["--eval-every", "5"]


@pytest.mark.parametrize(
    ("args", "field", "remedy"),
    [
        (["--keep-best", "eval/score"], "--keep-best", "--eval-every"),
        ([*EVERY, "--keep-best", "score/mean"], "--keep-best", "eval/score"),
        ([*EVERY, "--keep-best", "eval/tasks"], "--keep-best", "eval/score"),
        ([*EVERY, "--keep-best", "eval/pass@8"], "--keep-best", "--eval-samples 8"),
        (["--eval-samples", "2"], "--eval-samples", "--eval-every"),
        (["--eval-temperature", "0"], "--eval-temperature", "--eval-every"),
        (["--eval-by", "level"], "--eval-by", "--eval-every"),
        ([*EVERY, "--eval-pass-score", "1.5"], "--eval-pass-score", "help"),
    ],
)
def test_each_rule_names_flag_value_and_remedy(args: list[str], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*AGENT, *args])
    assert caught.value.field == field
    assert re.search(remedy, caught.value.remedy)


@pytest.mark.parametrize(
    "args",
    [
        [*EVERY, "--keep-best", "eval/pass@4", "--eval-temperature", "0"],
        [*EVERY, "--keep-best", "eval/score/hard/er"],
        ["--eval-at-start", "--eval-samples", "2"],
        ["--eval-steps", "5", "--eval-n-samples-per-prompt", "2"],
    ],
)
def test_what_fits_is_taken(args: list[str]) -> None:
    config = load_config([*AGENT, *args])
    assert config.training.eval_every == (0 if "--eval-at-start" in args else 5)
