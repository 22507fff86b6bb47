"""One GPU for an engine and a learner rank: they share it without a flag, and runs for which it is too few or too small are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config, load_eval
from agentrl.resolve.memory import memory_sign, with_shares
from agentrl.resolve.sizing.memory import GIB

AGENT = ["--agent", "envs/arithmetic.py"]
SEVEN = str(Path(__file__).parents[3] / "docs" / "models" / "qwen2.5-7b.json")


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("flags", "gpus", "shared", "turns"),
    [
        ([], 1, True, True),
        (["--async"], 1, True, False),
        (["--async", "--colocate"], 1, True, False),
        (["--runtime", "local"], 8, True, True),
        ([], 2, False, False),
        ([], 0, False, False),
        (["--device", "cpu"], 1, False, False),
        (["--ray-address", "auto"], 1, False, False),
    ],
)
def test_an_engine_and_a_rank_with_one_gpu_share_it(
    flags: list[str], gpus: int, shared: bool, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, gpus)
    config = load_config([*AGENT, *flags])
    assert (config.weights.colocate, config.weights.sleeps) == (shared, turns)


@pytest.mark.vllm
@pytest.mark.parametrize(("flags", "gpus", "needed"), [(["--num-engines", "2"], 2, 3), (["--tensor-parallel-size", "2"], 1, 3)])
def test_too_few_gpus_are_told_before_anything_starts(flags: list[str], gpus: int, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=rf"need {needed} GPUs, and this machine has {gpus}.*--colocate"):
        load_config([*AGENT, *flags])
    assert load_config([*AGENT, *flags, "--ray-address", "auto"]).engine.name == "vllm"  # whose machines may still come
    with pytest.raises(ConfigError, match="need 4 GPUs"):
        load_eval([*AGENT, "--num-engines", "4"])


def test_an_asynchronous_run_on_one_gpu_needs_room_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 1)
    config = with_shares(load_config([*AGENT, "--async"]))
    assert config.weights.learner_memory_gib > 0  # what vLLM leaves, in place of 90 % for itself
    assert memory_sign(config, 24 * GIB) is None
    large = with_shares(changed(config, model=SEVEN, gradient_checkpointing=True, learner_memory_gib=0.0))
    with pytest.raises(ConfigError, match=r"a learner rank needs [\d.]+ GiB"):
        memory_sign(large, 24 * GIB)
