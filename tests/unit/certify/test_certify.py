"""Verdicts: exact for models that are computed rightly, wrong for every error that is planted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from agentrl.assets import tiny_model_path
from agentrl.certify import run
from agentrl.certify.before import KNOWN
from agentrl.certify.compare import compare_adapter
from agentrl.certify.configs import read_config
from agentrl.certify.results import Certificate, Verdict
from agentrl.certify.run import certify, trial_batch
from agentrl.core.errors import ConfigError
from agentrl.engine import batcher
from agentrl.learner import attention, kernels, layout, lora, models
from agentrl.learner.lora import add_adapter
from agentrl.learner.plan import LoraConfig
from agentrl.weights.twin import build_twin, twin_config
from tests.model_matrix import READ_IMAGES, image_configuration

CONFIGS = Path(__file__).parents[2] / "model_configs"
VARLEN: Callable[..., Tensor] = attention._varlen
BATCHER: Any = batcher
RUN: Any = run
LAYOUT: Any = layout
EXACT, WRONG = Verdict.EXACT, Verdict.WRONG
EVERYTHING = {"eager, padded": EXACT, "sdpa, padded": EXACT, "varlen, packed": EXACT}
MODELS: Mapping[str, Mapping[str, Verdict]] = {
    "deepseek-v3": EVERYTHING | {"varlen, prefix trees": EXACT, "transformers": EXACT},
    "gemma-3-27b": {"eager, padded": EXACT, "sdpa, padded": EXACT, "LoRA and its merge": EXACT, "transformers": EXACT},
    "glm-4.5": EVERYTHING | {"varlen, prefix trees": EXACT, "transformers": EXACT},
    "qwen3-235b-a22b": EVERYTHING | {"varlen, prefix trees": EXACT, "transformers": EXACT},
    "gpt-oss-120b": {"eager, padded": EXACT},
    "llama-4-scout": {"eager, padded": EXACT, "sdpa, padded": EXACT, "transformers": EXACT},
}
SLOW = ("qwen3-235b-a22b", "gpt-oss-120b", "llama-4-scout")
SECONDS = 60.0


def verdicts(certificate: Certificate) -> dict[str, Verdict]:
    return {comparison.name: comparison.verdict for comparison in certificate.comparisons}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS])
def test_large_models_are_certified_within_a_minute(name: str) -> None:
    certificate = certify(name, read_config(CONFIGS / f"{name}.json"))
    found = verdicts(certificate)
    assert {part: found[part] for part in MODELS[name]} == dict(MODELS[name])
    assert certificate.seconds < SECONDS
    assert all(comparison.gradient is None for comparison in certificate.comparisons if comparison.part == "adapter")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "qwen2_5_vl" else pytest.mark.slow) for kind in READ_IMAGES])
def test_families_that_read_images_are_exact(kind: str) -> None:
    certificate = certify(kind, image_configuration(kind))
    assert certificate.verdict is EXACT, certificate.wrong
    packs = not kind.startswith("gemma")
    names = {"eager, padded", "sdpa, padded", "transformers", *(("varlen, packed", "varlen, prefix trees") if packs else ())}
    assert {name: found for name, found in verdicts(certificate).items() if name in names} == dict.fromkeys(names, EXACT)


def test_positions_of_images_that_are_those_of_text_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LAYOUT, "positions_of", lambda count, placed, axes: np.tile(np.arange(count), (axes, 1)))
    found = certify("qwen2_5_vl", image_configuration("qwen2_5_vl"), only=("sdpa",))
    assert found.verdict is Verdict.WRONG


def test_the_configuration_of_a_model_that_reads_images_is_read_whole(vision_model: str) -> None:
    assert read_config(Path(vision_model)).model_type == "idefics3"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("llama", "qwen3_moe") else pytest.mark.slow) for kind in sorted(KNOWN)]
)
def test_types_that_are_not_tried_before_a_run_are_exact(kind: str) -> None:
    certificate = certify(kind, CONFIG_MAPPING[kind](), only=("eager", "sdpa", "varlen"))
    assert certificate.verdict is EXACT, certificate.wrong
    assert {name for name in verdicts(certificate) if "twice" not in name} >= set(EVERYTHING)


def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the learner take every kernel without its own proofs."""
    monkeypatch.setattr(kernels.Proof, "problem", lambda *_, **__: "")
    monkeypatch.setattr(kernels, "can_pack", lambda *_, **__: True)


def test_dropout_that_stays_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "disable_dropout", lambda _: None)
    found = verdicts(certify("llama", CONFIG_MAPPING["llama"](attention_dropout=0.2), only=("eager",)))
    assert found == {"eager, padded": WRONG, "eager, padded, twice": WRONG}


def test_a_kernel_without_the_soft_cap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncapped(*parts: Any) -> Tensor:
        return VARLEN(*parts[:-1], None)

    monkeypatch.setitem(attention._PACKED, "varlen", uncapped)
    refused = certify("gemma2", CONFIG_MAPPING["gemma2"](), only=("varlen",))
    assert refused.exit_code == 2, "the learner tries this itself"
    unproven(monkeypatch)
    certificate = certify("gemma2", CONFIG_MAPPING["gemma2"](), only=("varlen",))
    assert verdicts(certificate)["varlen, packed"] is WRONG
    assert certificate.exit_code == 1


def test_rows_back_to_back_that_see_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *options: Any) -> Tensor:
        return VARLEN(query, key, value, bounds[[0, -1]], len(query), *options)

    monkeypatch.setitem(attention._PACKED, "varlen", leaking)
    refused = certify("llama", CONFIG_MAPPING["llama"](), only=("varlen",))
    assert refused.exit_code == 2, "the learner tries this itself"
    unproven(monkeypatch)
    assert verdicts(certify("llama", CONFIG_MAPPING["llama"](), only=("varlen",)))["varlen, packed"] is WRONG


def test_a_window_of_one_token_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wider(*parts: Any) -> Tensor:
        *others, window, softcap = parts
        return VARLEN(*others, window + 1, softcap)

    monkeypatch.setitem(attention._PACKED, "varlen", wider)
    assert verdicts(certify("mistral", CONFIG_MAPPING["mistral"](), only=("varlen",)))["varlen, packed"] is WRONG


def test_errors_of_merge_and_engine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = BATCHER.sample

    def shifted(*parts: Any) -> Any:
        tokens, logprobs = sample(*parts)
        return tokens, [logprob + 0.01 for logprob in logprobs]

    monkeypatch.setattr(batcher, "sample", shifted)
    monkeypatch.setattr(lora, "_merged", lambda layer, weight, parameters: weight)
    found = certify("llama", CONFIG_MAPPING["llama"]())
    assert [each.name for each in found.wrong] == ["LoRA and its merge", "transformers"]
    assert found.wrong[1].logprob == pytest.approx(0.01, abs=1e-4)


def test_an_error_of_the_second_seed_too_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    compare = RUN.compare_kernel

    def once(twin: str, kernel: str, batch: Any, expected: Any) -> Any:
        built.append(1)
        return [replace(each, verdict=WRONG) if len(built) == 1 else each for each in compare(twin, kernel, batch, expected)]

    monkeypatch.setattr(RUN, "compare_kernel", once)
    certificate = certify("llama", CONFIG_MAPPING["llama"](), only=("sdpa",))
    assert len(built) == 2
    assert certificate.verdict is EXACT
    assert certificate.comparisons[0].reason == "exact with the second of two seeds"


def test_nan_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*parts: Any) -> Tensor:
        return torch.full_like(VARLEN(*parts), float("nan"))

    monkeypatch.setitem(attention._PACKED, "varlen", broken)
    unproven(monkeypatch)
    assert verdicts(certify("llama", CONFIG_MAPPING["llama"](), only=("varlen",)))["varlen, packed"] is WRONG


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["bundled", "llama", "qwen3", "gemma2", "gpt_oss"])
def test_vllm_samples_what_the_model_computes(kind: str) -> None:
    pytest.importorskip("vllm")
    config = read_config(tiny_model_path()) if kind == "bundled" else CONFIG_MAPPING[kind]()
    found = {comparison.name: comparison for comparison in certify(kind, config, vllm=True).comparisons}
    assert found["vllm"].verdict is EXACT, found["vllm"].reason


def test_an_engine_that_takes_too_long_is_named_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(run, "_sample", never)
    monkeypatch.setitem(run.DEADLINE_S, "transformers", 0.1)
    batch: Any = None
    found = run.compare_engine("twin", batch, None)
    assert (found.verdict, found.reason) == (Verdict.UNTRIED, "it gave no answer within 0.1 s")


def test_layers_that_the_model_never_calls_have_no_adapter(tmp_path: Path) -> None:
    """Jamba multiplies by the weight of ``dt_proj`` itself, past what stands beside the layer."""
    twin = twin_config(CONFIG_MAPPING["jamba"]())
    build_twin(twin).save_pretrained(tmp_path)
    found = compare_adapter(str(tmp_path), trial_batch(0))
    assert (found.verdict, found.reason) == (Verdict.EXACT, "the experts have no adapter")
    with pytest.raises(ConfigError, match="JambaForCausalLM uses the weight of dt_proj by itself"):
        add_adapter(build_twin(twin), LoraConfig(lora_rank=4, lora_target_modules="q_proj,dt_proj"), base="")
