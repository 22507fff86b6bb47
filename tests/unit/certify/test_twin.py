"""Twins: small, and with everything that decides how a token is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from agentrl.certify.configs import read_config
from agentrl.certify.run import trial_batch
from agentrl.core.errors import ConfigError
from agentrl.learner.probes import probe
from agentrl.weights.twin import TRAINED, build_twin, parameters_of, twin_config
from agentrl.weights.twin_sizes import EXPERTS, THRESHOLD, VOCABULARY, WINDOW

CONFIGS = sorted((Path(__file__).parents[2] / "model_configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_twin_has_every_type_of_layer_of_a_large_model_and_its_ratio_of_heads(path: Path) -> None:
    real = read_config(path)
    whole = twin_config(real)
    assert type(whole) is type(real)
    real, twin = real.get_text_config(), whole.get_text_config()
    assert set(getattr(twin, "layer_types", None) or ()) == set(getattr(real, "layer_types", None) or ())
    assert 2 <= twin.num_hidden_layers <= 4
    assert twin.num_attention_heads // twin.num_key_value_heads == min(8, real.num_attention_heads // real.num_key_value_heads)
    assert twin.vocab_size == VOCABULARY
    experts = {getattr(twin, name, EXPERTS) for name in ("num_experts", "n_routed_experts", "num_local_experts")}
    assert experts == {EXPERTS}
    assert parameters_of(build_twin(whole)) < 1_000_000


def test_a_twin_keeps_dense_layers_before_those_with_experts() -> None:
    twin = twin_config(read_config(next(path for path in CONFIGS if path.stem == "deepseek-v3")))
    assert (twin.first_k_dense_replace, twin.num_hidden_layers) == (1, 2)
    mlps = [type(layer.mlp).__name__ for layer in build_twin(twin).model.layers]
    assert len(set(mlps)) == 2


def test_what_disturbs_a_model_is_kept() -> None:
    seed = CONFIG_MAPPING["seed_oss"](residual_dropout=0.3, attention_dropout=0.2)
    assert (twin_config(seed).residual_dropout, twin_config(seed).attention_dropout) == (0.3, 0.2)
    assert twin_config(CONFIG_MAPPING["phimoe"](router_jitter_noise=0.05)).router_jitter_noise == 0.05


def test_factors_of_a_rotary_embedding_fit_the_narrow_heads() -> None:
    half = 3072 // 32 // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half, "long_factor": [float(at) for at in range(half)]}
    phi = CONFIG_MAPPING["phi3"](rope_parameters=rope, max_position_embeddings=131072, original_max_position_embeddings=4096)
    twin = twin_config(phi)
    size = twin.hidden_size // twin.num_attention_heads
    assert len(twin.rope_parameters["long_factor"]) == size // 2
    assert twin.original_max_position_embeddings == TRAINED
    assert twin.max_position_embeddings == 32 * TRAINED
    build_twin(twin)


def test_windows_chunks_and_contexts_that_decide_something_are_shorter_than_rows() -> None:
    assert twin_config(CONFIG_MAPPING["gemma2"]()).sliding_window == WINDOW
    assert twin_config(CONFIG_MAPPING["llama4_text"]()).attention_chunk_size == THRESHOLD
    dynamic = CONFIG_MAPPING["llama"](rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert twin_config(dynamic).max_position_embeddings == TRAINED


def test_a_single_key_head_stays_the_only_one() -> None:
    twin = twin_config(CONFIG_MAPPING["gemma"](num_key_value_heads=1))
    assert (twin.num_attention_heads, twin.num_key_value_heads) == (4, 1)


def test_widths_by_layer_and_layers_that_use_the_keys_of_others() -> None:
    twin = twin_config(CONFIG_MAPPING["gemma3n_text"]())
    assert twin.intermediate_size == [96] * twin.num_hidden_layers
    assert (twin.num_hidden_layers, twin.num_kv_shared_layers) == (4, 2)
    assert twin_config(CONFIG_MAPPING["qwen2_moe"](decoder_sparse_step=2)).num_hidden_layers == 4


def test_sections_of_positions_in_time_and_space_fill_the_narrow_heads() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    twin = twin_config(CONFIG_MAPPING["qwen2_vl_text"](rope_parameters=rope))
    assert sum(twin.rope_parameters["mrope_section"]) == twin.hidden_size // twin.num_attention_heads // 2
    assert all(twin.rope_parameters["mrope_section"])


def test_rows_lie_on_both_sides_of_the_thresholds_and_the_learner_tries_its_layouts_on_less() -> None:
    lengths = trial_batch().input_lengths().tolist()
    assert min(lengths) < min(WINDOW, THRESHOLD)
    assert max(lengths) > 2 * max(WINDOW, THRESHOLD)
    # What these short rows do not show in the real model, they must not show in a twin.
    assert probe(CONFIG_MAPPING["llama"](), packed=True).num_tokens < min(WINDOW, THRESHOLD)


def test_the_same_seed_gives_the_same_weights() -> None:
    twin = twin_config(CONFIG_MAPPING["qwen3"]())
    one, again, other = (build_twin(twin, seed=seed).get_input_embeddings().weight for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def _write(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "vit"}, "no type of causal language models"),
        ({}, "cannot be read"),
    ],
)
def test_other_models_are_refused_by_name(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_config(_write(tmp_path, settings))


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        read_config(tmp_path)
