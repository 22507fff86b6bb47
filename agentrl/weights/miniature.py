"""A miniature of a model: the same classes and kinds of layers, few and narrow, with random weights, in float32 on the CPU.

How a model computes is proven on it (rows that see each other, a kernel that leaves out what layers ask for) in a fraction of a second,
whatever the size of the model. Windows and chunks are so short that a row of `ROW` tokens goes far beyond them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from agentrl.core.tokenizers import quiet_transformers
from agentrl.weights.rope import fix_rope

ROW = 40
"""Tokens that go far beyond every window and chunk of a miniature."""

VOCABULARY, HEAD, POSITIONS = 128, 16, 8 * ROW
MOST_PARAMETERS = 20_000_000
"""Parameters of a miniature at most: more mean that its configuration has sizes of names that are not known here."""

SIZES = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": 4 * ROW,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": 4,
    "head_dim": HEAD,
    "global_head_dim": HEAD,
    "swa_head_dim": HEAD,
    "v_head_dim": HEAD,
    "swa_v_head_dim": HEAD,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": HEAD,
    "qk_head_dim": 2 * HEAD,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": HEAD,
    "mamba_d_state": HEAD,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 1,
    "mamba_dt_rank": 4,
    "state_size": HEAD,
    "n_groups": 1,
    "num_heads": 8,
    "expand": 2,
    "chunk_size": 8,
    "time_step_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": HEAD,
    "linear_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "lru_width": 64,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "window_size": 8,
}
"""Sizes of a miniature; a name that a configuration does not have, or that is nothing there, is passed over."""


def miniature(model: nn.Module) -> Any:
    """Return a miniature of a causal language model of transformers, which attends by its own code; `None` if it cannot be built."""
    config: Any = model.config
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            small = _shrunk(config.get_text_config())
            kind: Any = AutoModelForCausalLM if small.model_type != config.model_type else type(model)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in _built(kind, small).parameters())
            if size > MOST_PARAMETERS:
                return None
            made = _built(kind, small).eval().requires_grad_(False)
            _spread(made)
            fix_rope(made, POSITIONS)
    except Exception:  # code of any model's author: a configuration in other words, or sizes that do not go together
        return None
    return made


def _built(kind: Any, config: Any) -> Any:
    build = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
    return build(config, dtype=torch.float32, attn_implementation="eager")


def _spread(model: nn.Module) -> None:
    """Draw matrices so far from 0 that attention prefers some tokens by much, which shows in what another token sees."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.15)


def _shrunk(config: Any) -> Any:
    values: dict[str, Any] = config.to_dict()
    own = dict(config.attribute_map)
    layers = values[own.get("num_hidden_layers", "num_hidden_layers")]
    chosen = _layers(values, layers)
    for name, value in values.items():
        if _per_layer(value, layers):
            values[name] = [value[layer] for layer in chosen]
    values[own.get("num_hidden_layers", "num_hidden_layers")] = len(chosen)
    _shrink_heads(values, own)
    values |= dict(_sizes(values, own))
    for name, value in values.items():
        if name.endswith("_token_id") and value is not None:
            values[name] = 0
    if isinstance(values.get("rope_parameters"), Mapping):
        values["rope_parameters"] = _shrunk_rope(values["rope_parameters"])
    left_out = ("architectures", "quantization_config", "auto_map", "per_layer_config")
    kept = {name: value for name, value in values.items() if name not in left_out}
    return type(config).from_dict(kept)


def _sizes(values: Mapping[str, Any], own: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for name, size in SIZES.items():
        if values.get(own.get(name, name)):
            yield own.get(name, name), size
    for name, value in values.items():
        if name.endswith(("intermediate_size", "intermediate_size_mlp")) and value:
            yield name, 48


def _shrink_heads(values: dict[str, Any], own: Mapping[str, str]) -> None:
    """Keep whether key heads are one, some, or as many as query heads."""
    for key, query in (("num_key_value_heads", "num_attention_heads"), ("swa_num_key_value_heads", "swa_num_attention_heads")):
        heads, keys = values.get(own.get(query, query)), values.get(own.get(key, key))
        if heads and keys:
            values[own.get(key, key)] = 1 if keys == 1 else 4 if keys == heads else 2
            values[own.get(query, query)] = 4


def _per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers


def _layers(values: Mapping[str, Any], layers: int) -> list[int]:
    """Return the numbers of the layers to keep: the first of each kind, in order, and at least two."""
    lists = [value for value in values.values() if _per_layer(value, layers) and all(isinstance(item, str | int) for item in value)]
    kinds: dict[tuple[Any, ...], int] = {}
    for layer in range(layers):
        kinds.setdefault(tuple(value[layer] for value in lists), layer)
    first = sorted(kinds.values())[:6]
    return first if len(first) > 1 else list(range(min(2, layers)))


def _shrunk_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in rope.values()):  # by kind of layer
        return {name: _shrunk_rope(value) if isinstance(value, Mapping) else value for name, value in rope.items()}
    small, half = dict(rope), int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = SIZES["original_max_position_embeddings"]
    for name in ("short_factor", "long_factor"):
        if name in small:
            small[name] = [*small[name], *[small[name][-1]] * half][:half]
    if section := small.get("mrope_section"):
        parts = [half * part // sum(section) for part in section]
        small["mrope_section"] = [parts[0] + half - sum(parts), *parts[1:]]
    return small
