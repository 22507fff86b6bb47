"""Defaults that follow from the size of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.algo.plan import AlgoConfig
from agentrl.config.load import read_flags
from agentrl.config.mapping import from_mapping
from agentrl.config.model_defaults import defaults_of, described, rate_warning
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.resolve.commands import TRAIN, load_config
from agentrl.resolve.plan import with_defaults
from tests.given import train_settings

ROOT = Path(__file__).parents[3]
SEVEN = str(ROOT / "docs" / "models" / "qwen2.5-7b.json")
HUGE = str(ROOT / "docs" / "models" / "qwen2.5-72b.json")


def read(*words: str) -> TrainConfig:
    return with_defaults(read_flags(TRAIN, ["--agent", "envs/calculator.py", *words])).settings


def test_the_bundled_model_keeps_the_plain_defaults() -> None:
    config = read()
    assert replace(config, algo=AlgoConfig()) == changed(TrainConfig(), agent="envs/calculator.py")
    assert described(config) == ""


def test_a_large_model_gets_a_low_rate_and_checkpointing() -> None:
    config = read("--model", SEVEN)
    learner = config.learner
    assert (learner.learning_rate, learner.critic_learning_rate, learner.gradient_checkpointing) == (1e-6, 1e-5, True)
    assert (learner.micro_batch_tokens, config.rollout.max_new_tokens) == (16384, 1024)
    assert read("--model", HUGE).learner.micro_batch_tokens == 8192
    assert "7.62e9 parameters" in described(config)
    assert "--learning-rate 1e-06" in described(config)


def test_what_is_given_stays_even_if_it_is_the_plain_default(tmp_path: Path) -> None:
    plain = ["--learning-rate=5e-4", "--no-gradient-checkpointing", "--max_new_tokens", "128"]
    config = read("--model", SEVEN, *plain)
    assert (config.learner.learning_rate, config.learner.gradient_checkpointing, config.rollout.max_new_tokens) == (5e-4, False, 128)
    assert config.learner.critic_learning_rate == 1e-5
    assert "--learning-rate 0.0005 (given)" in described(config)
    (tmp_path / "run.toml").write_text(f'model = "{SEVEN}"\n[learner]\nlearning_rate = 5e-4\n')
    filed = read("--config", str(tmp_path / "run.toml"))
    assert (filed.learner.learning_rate, filed.learner.gradient_checkpointing) == (5e-4, True)


def test_a_model_whose_size_is_unknown_is_taken_for_a_large_one() -> None:
    config = load_config(["--agent", str(ROOT / "envs" / "calculator.py"), "--model", "nobody/has-this-model"])
    assert config.learner.learning_rate == 1e-6
    assert "not known" in described(config)


def test_an_adapter_has_a_higher_rate() -> None:
    learner = read("--model", SEVEN, "--lora-rank", "16").learner
    assert (learner.learning_rate, learner.critic_learning_rate, learner.gradient_checkpointing) == (1e-5, 1e-4, True)
    assert read("--lora-rank", "16").learner.learning_rate == 2e-3
    assert read("--model", SEVEN, "--lora-rank", "16", "--learning-rate", "3e-6").learner.learning_rate == 3e-6


def test_python_settings_have_the_same_defaults() -> None:
    agent = str(ROOT / "envs" / "calculator.py")
    assert train_settings(agent, {"model": "nobody/has-this-model"}).learner.learning_rate == 1e-6
    assert train_settings(agent, {"model": "nobody/has-this-model", "learning_rate": 5e-4}).learner.learning_rate == 5e-4
    assert train_settings(agent, {}).learner.learning_rate == 5e-4


def test_answers_leave_room_for_a_prompt() -> None:
    assert read("--model", SEVEN, "--max-model-len", "600").rollout.max_new_tokens == 300


@pytest.mark.parametrize(("rate", "warned"), [(1e-6, False), (1e-5, False), (2e-5, True), (5e-4, True)])
def test_a_rate_that_destroys_a_pretrained_model_is_warned_about(rate: float, warned: bool) -> None:
    found = rate_warning(read("--model", SEVEN, "--learning-rate", str(rate)))
    assert (found is not None) == warned
    assert found is None or "1e-06" in found[1]
    assert rate_warning(read("--learning-rate", "5e-3")) is None


def test_a_saved_configuration_is_complete() -> None:
    """What a run saves is read again without asking the model."""
    from dataclasses import asdict

    config = read("--model", SEVEN)
    assert from_mapping(TrainConfig, asdict(config)) == config
    assert set(defaults_of(config)) <= {name for section in asdict(config).values() for name in section}
