"""The twin of a model: its class with a few narrow layers and random weights, made from the configuration alone.

A twin keeps everything that decides how a token is computed: types of layers, ratio of heads, form of the experts and of their router,
kind of rotary embedding, soft caps, multipliers, dropout. Sizes shrink, and so do windows, chunks and thresholds of positions, so that
rows of a few dozen tokens lie on both sides of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.core.errors import ConfigError
from agentrl.core.tokenizers import quiet_transformers

WIDTH, HEAD, VOCABULARY, EXPERTS, POSITIONS = 64, 16, 512, 4, 512
STD = 0.15
"""Standard deviation of the weights; with that of a fresh model, 0.02, all tokens would be about equally likely and errors would not show."""
WINDOW, THRESHOLD = 31, 32
"""Tokens of a window of attention, and of a chunk; positions at which a rotary embedding or a scale changes. The rows on which a learner
tries its layouts are shorter, as they are shorter than the real thresholds, so a twin shows what they miss."""
MOST_LAYERS = 4
LARGEST = 20_000_000
"""Most parameters of a twin; one that has more was not understood."""

CAPS: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "word_embed_proj_dim": WIDTH,
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": THRESHOLD,
    "chunk_size": THRESHOLD,
    "mamba_chunk_size": THRESHOLD,
    "original_max_position_embeddings": THRESHOLD,
    "floor_scale": THRESHOLD,
    "rotary_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": THRESHOLD,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "num_experts_per_token": 2,
    "num_expert_group": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "mlp_expansion_factor": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "num_kv_shared_layers": 2,
    "lru_width": WIDTH,
}
"""Fields whose values are cut down to these."""
SOFT_CAPS: Mapping[str, float] = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0, "router_logit_softcapping": 1.0}
"""Soft caps of a twin, low enough to change its small scores."""
PERIODS = ("decoder_sparse_step", "interleave_moe_layer_step", "attn_layer_period", "expert_layer_period", "full_attention_interval")
"""Fields with the number of layers after which a type of layers comes again."""
PLACES = ("moe_layers", "mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids")
"""Fields that list the numbers of layers of a type."""
PER_LAYER = "per_layer_config"
"""Field with the settings of single layers by their numbers."""
PATTERN = "hybrid_override_pattern"
"""Field that has a letter for every layer."""
DERIVED = ("transformers_version", "architectures", "dtype", "torch_dtype", "quantization_config", "auto_map", "qk_head_dim", "output_attentions")
"""Fields that a twin does not take over: they follow from others, or say how the weights are stored."""


def read_config(model: Path, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration of the text part of a model, from a directory or a ``config.json`` alone.

    Raises:
        ConfigError: If there is none, or transformers has no causal language model of this type.
    """
    from transformers import AutoConfig

    path = model / "config.json" if model.is_dir() else model
    remedy = "Name a directory of a Hugging Face model, or its config.json."
    if not path.is_file():
        raise ConfigError("MODEL", str(model), "holds no config.json", remedy)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError("MODEL", str(model), f"its configuration cannot be read: {reason}", remedy) from error
    text = config.get_text_config()
    model_class(text, name=str(settings.get("model_type", "")))
    return text


def model_class(config: Any, *, name: str = "") -> Any:
    """Return the class of the causal language model with this configuration.

    Raises:
        ConfigError: If transformers has none.
    """
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if found is None:
        kind = name or config.model_type
        raise ConfigError("MODEL", kind, "is no type of causal language models of transformers", "Models of this type cannot be tried.")
    return found


def twin_config(config: Any) -> Any:
    """Return the configuration of the twin of a model with the configuration `config`, which is that of a text model."""
    names = config.attribute_map
    text = {name: value for name, value in config.to_dict().items() if _is_kept(name)}
    sizes = _Sizes(text, names)
    text |= {name: _shrunk(name, value) for name, value in text.items()}
    text |= _layers(text, sizes) | _special_tokens(text)
    text |= sizes.heads() | sizes.state_space() | _positions(text, names) | _rotary(text, sizes)
    with quiet_transformers():
        return type(config)(**text)


def build_twin(config: Any, *, seed: int = 0) -> Any:
    """Return the model of a twin's configuration with random weights, the same for the same seed, in float32."""
    torch.manual_seed(seed)
    with quiet_transformers():
        with torch.device("meta"):
            size = parameters_of(model_class(config)._from_config(config, attn_implementation="eager"))
        if size > LARGEST:
            problem = f"is of a form whose twin would have {size:,} parameters"
            raise ConfigError("MODEL", config.model_type, problem, "Models of this type cannot be tried.")
        model = model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if parameter is embedding and not getattr(config, "tie_word_embeddings", True) else STD
                parameter.normal_(0.0, scale, generator=generator)
            elif name.rpartition(".")[2] in ("bias", "sinks", "weight"):
                parameter.add_(torch.empty_like(parameter).normal_(0.0, STD, generator=generator))
    return model


def _is_kept(name: str) -> bool:
    return name not in DERIVED and not name.startswith("_")


class _Sizes:
    """Numbers of heads and widths of a twin, from those of the model."""

    def __init__(self, text: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._text, self._names = text, names
        heads, kv = self._get("num_attention_heads"), self._get("num_key_value_heads")
        self.layers = self._get("num_hidden_layers") or 2
        hidden, size = self._get("hidden_size"), self._get("head_dim")
        ratio = max(1, heads // kv) if heads and kv else 1
        single = kv == 1 and heads > 1
        self.kv = 1 if single else 2 if ratio > 1 else 4
        self.heads_number = 4 if single else self.kv * min(ratio, 8)
        apart = bool(size and heads and size * heads != hidden) or "qk_rope_head_dim" in text
        self.head = HEAD if apart or self.heads_number <= 4 else HEAD // 2
        self.width = WIDTH if apart else self.heads_number * self.head

    def own(self, name: str) -> str:
        """Return the name that the configuration has for a field of transformers."""
        return self._names.get(name, name)

    def _get(self, name: str) -> int:
        value = self._text.get(self.own(name))
        return value if isinstance(value, int) else 0

    def heads(self) -> dict[str, Any]:
        """Return the fields of widths and heads."""
        head = 8 if "qk_rope_head_dim" in self._text else self.head
        values = {"hidden_size": self.width, "num_attention_heads": self.heads_number, "num_key_value_heads": self.kv, "head_dim": head}
        values |= {"global_head_dim": 2 * self.head, "num_global_key_value_heads": self.kv, "d_kv": head, "embedding_size": self.width}
        found = {self.own(name): value for name, value in values.items() if self._text.get(self.own(name)) is not None}
        if "head_dim" in self._text:  # many configurations leave it to their model
            found["head_dim"] = head
        for name, value in self._text.items():
            if name.endswith(("intermediate_size", "ffn_hidden_size", "ffn_dim", "intermediate_size_mlp")) or name in ("n_inner", "ffn_size"):
                found[name] = [96] * len(value) if isinstance(value, list) else value and 96
        return found

    def state_space(self) -> dict[str, Any]:
        """Return the fields of layers that carry a state: their inner width is divided among 8 heads."""
        text = self._text
        expand = text.get("mamba_expand") or text.get("expand") or 2
        inner = int(expand * self.width)
        values = {"mamba_n_heads": 8, "mamba_num_heads": 8, "n_mamba_heads": 8, "mamba_d_ssm": inner, "mamba_dt_rank": 8, "time_step_rank": 8}
        values |= {"mamba_d_head": inner // 8, "mamba_head_dim": inner // 8, "mamba_headdim": inner // 8}
        if text.get("model_type") == "mamba2":
            values |= {"num_heads": 8, "head_dim": inner // 8}
        if "intermediate_size" in text and text.get("model_type") in ("mamba", "falcon_mamba"):
            values |= {"intermediate_size": inner}
        return {name: value for name, value in values.items() if text.get(name) is not None}


def _shrunk(name: str, value: Any) -> Any:
    """Return a field of the configuration cut down to its cap."""
    if name in SOFT_CAPS and value:
        return min(value, SOFT_CAPS[name])
    if isinstance(value, dict) and name.endswith("_config"):
        return {key: WIDTH if key == "hidden_size" else _shrunk(key, part) for key, part in value.items() if _is_kept(key)}
    cap = CAPS.get(name)
    if cap is None or isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [_shrunk(name, part) for part in value]
    return min(value, cap) if isinstance(value, int) and value > 0 else value


def _layers(text: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Return the fields that say which layer is of which type, for the fewest layers that show every type; two at least."""
    count = sizes.layers
    dense = int(text.get("first_k_dense_replace") or 0)
    columns = {name: value for name, value in text.items() if name not in PLACES and (_per_layer(value, count) or name == PATTERN and value)}
    places = {name: set(text[name]) for name in PLACES if isinstance(text.get(name), list)}
    kinds = [
        (*(_key(value[layer]) for value in columns.values()), *(layer in value for value in places.values()), layer < dense)
        for layer in range(count)
    ]
    periods = {name: min(int(text[name]), 2) for name in PERIODS if text.get(name)}
    offsets = {name: 1 for name in ("attn_layer_offset", "expert_layer_offset") if text.get(name)}
    again = bool(text.get("num_kv_shared_layers"))
    chosen = _representatives(kinds)
    if again or len(chosen) == 1 or any(value > 1 for value in periods.values()):
        chosen = (chosen * MOST_LAYERS)[: 2 if len(chosen) == 1 and not again and max(periods.values(), default=1) == 1 else MOST_LAYERS]
    chosen = sorted(chosen) if dense else chosen
    found: dict[str, Any] = {name: _picked(value, chosen) for name, value in columns.items()}
    found |= {name: [at for at, layer in enumerate(chosen) if layer in value] for name, value in places.items()}
    own = text.get(PER_LAYER)
    if own:
        by_number = {int(layer): {key: 2 * HEAD if key == "head_dim" else _shrunk(key, part) for key, part in values.items()} for layer, values in own.items()}
        found[PER_LAYER] = {at: by_number[layer] for at, layer in enumerate(chosen) if layer in by_number}
    if dense:
        found["first_k_dense_replace"] = sum(layer < dense for layer in chosen)
    return found | periods | offsets | {sizes.own("num_hidden_layers"): len(chosen)}


def _per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count > 1


def _picked(value: Any, chosen: Sequence[int]) -> Any:
    parts = [value[layer] for layer in chosen]
    return "".join(parts) if isinstance(value, str) else parts


def _key(value: Any) -> Any:
    return json.dumps(value, sort_keys=True, default=str)


def _representatives(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return a layer of every kind, as many as there is room for; those that show something new come first."""
    firsts = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    waiting, chosen = sorted(firsts.values()), list[int]()
    seen: set[tuple[int, Any]] = set()
    while waiting and len(chosen) < MOST_LAYERS:
        best = max(waiting, key=lambda layer: len(set(enumerate(kinds[layer])) - seen))
        waiting.remove(best)
        chosen.append(best)
        seen |= set(enumerate(kinds[best]))
    return sorted(chosen)


def _special_tokens(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of special tokens, moved to the end of the vocabulary."""
    found: dict[str, Any] = {}
    for name, value in text.items():
        if name.endswith(("_token_id", "_token_index")) and value is not None:
            found[name] = VOCABULARY - 1 if isinstance(value, list) or value >= VOCABULARY else value
    return found


def _positions(text: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the longest context: a threshold of the rotary embedding where that is what it is, else enough for every row."""
    name = names.get("max_position_embeddings", "max_position_embeddings")
    if text.get(name) is None:
        return {}
    parameters = text.get("rope_parameters") or {}
    every = [part for part in (parameters, *parameters.values()) if isinstance(part, Mapping)]
    kinds = {part.get("rope_type") for part in every}
    if "dynamic" in kinds:
        return {name: THRESHOLD}
    if "longrope" in kinds:
        before = text.get("original_max_position_embeddings") or max(part.get("original_max_position_embeddings") or 1 for part in every)
        return {name: max(2, int(text[name] // max(1, before))) * THRESHOLD if before != THRESHOLD else 4 * THRESHOLD}
    return {name: POSITIONS}


def _rotary(text: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Return the parameters of the rotary embedding with shrunk thresholds, and as many factors as the narrow heads have frequencies."""
    head = 8 if "qk_rope_head_dim" in text else sizes.head

    def parameters(value: Mapping[str, Any]) -> dict[str, Any]:
        half = int(head * float(value.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0)) // 2
        found: dict[str, Any] = {}
        for name, part in value.items():
            if isinstance(part, Mapping):
                found[name] = parameters(part)
            elif name in ("long_factor", "short_factor"):
                found[name] = [part[at * len(part) // half] for at in range(half)]
            elif name == "mrope_section":
                found[name] = [half - sum(half * share // sum(part) for share in part[1:]), *(half * share // sum(part) for share in part[1:])]
            else:
                found[name] = _shrunk(name, part)
        return found

    return {name: parameters(text[name]) for name in ("rope_parameters", "rope_scaling") if isinstance(text.get(name), Mapping)}


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
