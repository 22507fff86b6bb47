"""Settings of evaluations that would do nothing are refused with a way out."""

from __future__ import annotations

import re

import pytest

from agentrl.config.engine_rules import needed_gpus, num_engines, share_only_gpu
from agentrl.config.rules import EVAL_RULES
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config

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
        (["--eval-engines", "1"], "--eval-engines", "--eval-every"),
        (["--eval-at-start", "--eval-engines", "1"], "--eval-engines", "--eval-every"),
        ([*EVERY, "--eval-engines", "1", "--runtime", "local"], "--eval-engines", "--runtime ray"),
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
        [*EVERY, "--eval-engines", "2", "--num-engines", "2"],
    ],
)
def test_what_fits_is_taken(args: list[str]) -> None:
    config = load_config([*AGENT, *args])
    assert config.training.eval_every == (0 if "--eval-at-start" in args else 5)


def test_engines_for_evaluations_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(TrainConfig(), eval_every=5, eval_engines=2, tensor_parallel_size=2, num_learners=3)
    assert (num_engines(config), needed_gpus(config)) == (3, 9)
    monkeypatch.setattr("agentrl.config.engine_rules.num_gpus", lambda device: 1)
    single = changed(config, eval_engines=1, tensor_parallel_size=1, num_learners=1)
    assert not share_only_gpu(single).weights.colocate
    assert share_only_gpu(changed(single, eval_engines=0)).weights.colocate
    with pytest.raises(ConfigError, match=r"--eval-engines = 1.*--colocate"):
        EVAL_RULES[-1](changed(single, colocate=True))
