"""The model card: what it says, and when it is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.cluster.plan import RunConfig
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.callbacks import RunBegin, RunEnd
from agentrl.flow.plan import TrainingConfig
from agentrl.learner.plan import LoraConfig
from agentrl.rollout.plan import ModelConfig
from agentrl.track.card import ModelCard, card

SUMMARY = {
    "steps": 60,
    "episodes": 7680,
    "reward": {"first": 0.5, "last": 0.975},
    "score": {"first": None, "last": None},
    "staleness": {"max": 1.0},
}
STARTED = {"command": "agentrl train --agent 'a b.py' --async", "version": "0.2.0"}


def settings(**sections: Any) -> dict[str, Any]:
    config = dataclasses.replace(
        TrainConfig(run=RunConfig(agent="a b.py"), training=TrainingConfig(run_dir=Path("runs/first"))), **sections
    )
    found: dict[str, Any] = json.loads(to_json(config))
    return found


def parts(text: str) -> tuple[dict[str, Any], str]:
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_of_a_run_with_the_bundled_model() -> None:
    front, body = parts(card(settings(), SUMMARY, STARTED))
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["agentrl", "reinforcement-learning"]}
    assert body.startswith("\n# first\n")
    assert "    agentrl train --agent 'a b.py' --async\n" in body
    for row in (
        "| steps | 60 |",
        "| mean reward, first and last steps | 0.5 to 0.975 |",
        "| age of tokens | at most 1 steps |",
        "| agentrl | 0.2.0 |",
    ):
        assert row in body
    assert "score" not in body  # there is none


@pytest.mark.parametrize(
    ("model", "base"), [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("models/../smollm2", None), ("/a/b", None), ("./a", None)]
)
def test_only_a_name_on_a_hub_is_named_as_the_base(model: str, base: str | None) -> None:
    front, body = parts(card(settings(model=ModelConfig(model=model)), SUMMARY, STARTED))
    assert front.get("base_model") == base
    assert f"| initial model | `{model}` |" in body


def test_an_adapter_says_so() -> None:
    front, body = parts(card(settings(lora=LoraConfig(lora_rank=8)), SUMMARY, STARTED))
    assert front["library_name"] == "peft"
    assert "A LoRA adapter" in body


@pytest.mark.parametrize(("status", "written"), [("finished", True), ("failed", False), ("interrupted", False)])
def test_the_card_is_written_beside_a_model_that_was_saved(tmp_path: Path, status: str, written: bool) -> None:
    sink = ModelCard(tmp_path / "model")
    sink.on_run_begin(RunBegin(config=settings(), run_dir=tmp_path, resumed=False, step=0))
    sink.on_run_end(RunEnd(status=status, summary=SUMMARY))
    assert not (tmp_path / "model").exists()
    (tmp_path / "model").mkdir()
    sink.on_run_end(RunEnd(status=status, summary=SUMMARY))
    assert (tmp_path / "model" / "README.md").exists() is written
