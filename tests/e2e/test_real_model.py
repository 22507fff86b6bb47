"""A pretrained model that we did not make: SmolLM2-135M-Instruct, from a package, through the whole loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.api.pretrained import get_model
from agentrl.tune import tune
from tests.e2e.runs import ENVS, succeeded, train


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as `agentrl get-model` writes it."""
    return get_model("smollm2", tmp_path_factory.mktemp("models") / "smollm2")


@pytest.mark.real_model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("core", ["thread", "process"])
def test_two_steps_on_arithmetic(smollm2: Path, tmp_path: Path, core: str) -> None:
    arguments = ("--model", str(smollm2), "--num-steps", "2", "--groups-per-step", "4", "--n-samples-per-prompt", "4")
    limits = ("--max-new-tokens", "12", "--learning-rate", "1e-6", "--max-model-len", "512", "--engine-core", core)
    run = succeeded(train(tmp_path / "run", *arguments, *limits, agent=ENVS / "arithmetic.py", timeout_s=1700))
    assert len(run.metrics) == 2
    assert max(row["mismatch/max"] for row in run.metrics) <= 1e-3  # 30 layers in float32
    assert run.summary["ledger"]["trained"] == 8
    assert (run.directory / "model" / "config.json").exists()


@pytest.mark.real_model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("method", "data"), [("sft", "chats"), ("dpo", "pairs"), ("kto", "labelled"), ("reward-model", "helpful")])
def test_weights_in_4_bits_with_an_adapter_of_dora(method: str, data: str, smollm2: Path, tmp_path: Path) -> None:
    form = {"lora_rank": 8, "lora_variant": ("dora",), "load_in_4bit": True}
    sizes = {"num_steps": 3, "batch_size": 4, "eval_size": 8}
    given: dict[str, Any] = {"data": f"examples/tune/{data}.jsonl", "run_dir": tmp_path / "run", **sizes}
    if method == "kto":  # its loss begins at 0.5 with any model, and three steps at the usual rate are noise
        given["learning_rate"] = 1e-3
    result = tune(method, model=str(smollm2), **form, **given)
    assert result.status == "finished"
    assert result.summary["eval"]["last"]["loss"] < result.summary["eval"]["first"]["loss"]
