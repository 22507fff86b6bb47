"""The engine that a training run takes by itself: transformers for a tiny model of text on a CPU, vLLM for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.assets import VISION_MODEL, located_model, tiny_model_path
from agentrl.config.model_defaults import TINY, settled_engine
from agentrl.config.sections import changed
from agentrl.core.model_shape import read_shape
from agentrl.engine.facts import EngineFacts
from agentrl.resolve.commands import load_config, read_train
from agentrl.resolve.plan import RunPlan
from agentrl.resolve.saved import chosen_engine
from agentrl.suites.load import load_agent

AGENT = ["--agent", "envs/arithmetic.py"]
BLACK_BOX = ["--agent", "examples/openai_agent.py"]


@pytest.fixture(autouse=True)
def vllm_is_there_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineFacts, "is_installed", True)
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 0)


def settled(*flags: str, **changes: Any) -> tuple[str, str]:
    return settled_engine(changed(load_config([*AGENT, *flags]), **changes))


def test_a_tiny_model_on_a_cpu_takes_transformers_and_says_why() -> None:
    engine, why = settled()
    assert engine == "transformers"
    assert "0.85 million parameters on a CPU" in why
    assert "--engine vllm" in why


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_is_asked_for_stays(engine: str) -> None:
    plan = RunPlan.of(read_train([*AGENT, "--engine", engine]), named=False)
    assert (plan.settings.engine.engine, plan.notes, plan.sources["engine"]) == (engine, (), "flag")


@pytest.mark.parametrize(
    "flags",
    [
        ["--ray-address", "auto"],
        ["--publish", "adapter", "--lora-rank", "4"],
        ["--tool-parser", "hermes"],
        ["--reasoning-parser", "qwen3"],
        ["--engine-args", "kv_cache_dtype=fp8"],
        ["--tensor-parallel-size", "2"],
        ["--model", located_model(VISION_MODEL)],
    ],
)
def test_what_only_vllm_has_or_was_not_measured_keeps_it(flags: list[str]) -> None:
    assert settled(*flags) == ("vllm", "")


def test_a_machine_with_a_gpu_keeps_vllm_unless_the_run_is_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 1)
    assert settled() == ("vllm", "")
    assert settled("--device", "cpu")[0] == "transformers"


def test_without_vllm_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineFacts, "is_installed", property(lambda facts: not facts.module))
    assert settled() == ("transformers", "")


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, "transformers"),
        ({"num_hidden_layers": 60}, "vllm"),
        ({"model_type": "granite"}, "vllm"),
        ({"quantization_config": {"quant_method": "fp8"}}, "vllm"),
        ({"hidden_size": "wide"}, "vllm"),
    ],
)
def test_only_tiny_dense_models_of_a_known_form_were_measured(tmp_path: Path, changes: dict[str, Any], engine: str) -> None:
    config = json.loads((tiny_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    assert settled("--model", str(tmp_path))[0] == engine
    if "num_hidden_layers" in changes:
        shape = read_shape(str(tmp_path))
        assert shape is not None
        assert shape.parameters >= TINY


def test_a_mixture_of_experts_keeps_vllm(tmp_path: Path) -> None:
    config = json.loads((tiny_model_path() / "config.json").read_text())
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **experts}))
    assert settled("--model", str(tmp_path)) == ("vllm", "")


def test_an_agent_that_calls_the_model_itself_keeps_vllm() -> None:
    config = load_config(BLACK_BOX)
    assert chosen_engine(config, load_agent(config.run.agent)) == ("vllm", "")
    assert settled_engine(config)[0] == "transformers"  # the model alone would not
