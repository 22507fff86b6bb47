"""Settings of learned rewards, and what is read of a reward model's files before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.core.errors import ConfigError
from agentrl.engine.reward_model_facts import reward_model_facts
from agentrl.resolve.commands import load_config


def model(folder: Path, head: str = "score", size: int = 1, kind: str = "LlamaForSequenceClassification", **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [kind], **config}))
    save_file({f"{head}.weight": np.zeros((size, 8), "float32"), "model.norm.weight": np.ones(8, "float32")}, folder / "model.safetensors")
    return str(folder)


def test_the_head_is_found_under_the_names_that_systems_write(tmp_path: Path) -> None:
    assert reward_model_facts(model(tmp_path / "a")).head == "score"
    assert reward_model_facts(model(tmp_path / "b", "value_head")).head == "value_head"
    assert reward_model_facts(model(tmp_path / "c", "my_head", value_head_prefix="my_head")).head == "my_head"


def test_a_process_reward_model_and_the_scale_of_scores_are_read(tmp_path: Path) -> None:
    facts = reward_model_facts(model(tmp_path / "a", size=2, kind="LlamaForTokenClassification", mean=0.5, std=2.0))
    assert facts.per_step
    assert facts.scale == (0.5, 2.0)
    assert reward_model_facts(model(tmp_path / "b")).scale is None


def test_what_is_no_reward_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"score.weight has 2 outputs.*num_labels=1 \(agentrl reward-model does\)"):
        reward_model_facts(model(tmp_path / "two", size=2))
    with pytest.raises(ConfigError, match=r"no head that makes a score \(LlamaForCausalLM\).*value_head_prefix"):
        reward_model_facts(model(tmp_path / "lm", "lm_head", kind="LlamaForCausalLM"))
    with pytest.raises(ConfigError, match=r"no head that makes a score .*value_head_prefix in its config.json"):
        reward_model_facts(model(tmp_path / "named", "odd"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="agentrl merge"):
        reward_model_facts(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"holds no config.json"):
        reward_model_facts(str(tmp_path / "nothing"))


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    good, agent = model(tmp_path / "rm"), ["--agent", "envs/calculator.py"]
    for words, problem in (
        ([*agent, "--normalize-reward"], r"--normalize-reward = True: has no effect without a reward model"),
        ([*agent, "--reward-model", good, "--reward-model-weights", "1", "2"], r"one number for each of the 1 models"),
        (["--reward-model", good], r"--prompts.*a reward model has no tasks"),
        ([*agent, "--reward-model", good, "--environment-reward-weight", "0", "--overlong-buffer", "4"], r"penalties for length"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_config(words)


def test_prompts_and_a_model_need_no_environment(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1"}\n')
    config = load_config(
        ["--prompts", str(tmp_path / "tasks.jsonl"), "--reward-model", model(tmp_path / "rm"), model(tmp_path / "x" / "rm")]
    )
    assert config.run.agent == "answer:"
    assert config.reward.names == ("rm-0", "rm-1")
    assert config.reward.weights == (1.0, 1.0)
