"""Sizes of a twin: what the fields of a configuration shrink to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH, INNER_WIDTH, HEAD, ROTARY_HEAD, STATE_HEADS, VOCABULARY, EXPERTS = 64, 96, 16, 8, 8, 512, 4
WINDOW, THRESHOLD = 31, 32
"""Tokens of a window of attention, and of a chunk; positions at which a rotary embedding or a scale changes;
rows lie on both sides of them."""

VLLM_HEAD = 32
"""Size of a head where vLLM is tried too, whose kernels for a CPU take none that is smaller."""
LATENT = "qk_rope_head_dim"
"""Field of models whose keys and values come from a latent vector: the part of a head that is rotated."""
INNER = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "intermediate_size_mlp", "n_inner", "ffn_size")
"""Ends of the names of inner widths."""

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
    "rotary_dim": ROTARY_HEAD,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    LATENT: ROTARY_HEAD,
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
    "linear_num_heads": 4,
    "linear_head_dim": 16,
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
DERIVED = (
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "auto_map",
    "qk_head_dim",
    "output_attentions",
)
"""Fields that a twin does not take over: they follow from others, or say how the weights are stored."""


def is_kept(name: str) -> bool:
    """Return True for a field of a configuration that a twin takes over."""
    return name not in DERIVED and not name.startswith("_")


def shrunk(name: str, value: Any) -> Any:
    """Return a field of the configuration cut down to its cap."""
    if name in SOFT_CAPS and value:
        return min(value, SOFT_CAPS[name])
    if isinstance(value, dict) and name.endswith("_config"):
        return {key: WIDTH if key == "hidden_size" else shrunk(key, part) for key, part in value.items() if is_kept(key)}
    cap = CAPS.get(name)
    if cap is None or isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [shrunk(name, part) for part in value]
    return min(value, cap) if isinstance(value, int) and value > 0 else value


class Sizes:
    """Numbers of heads and widths of a twin, from those of the model."""

    def __init__(self, text: Mapping[str, Any], names: Mapping[str, str], head: int = 0) -> None:
        self._text, self._names = text, names
        heads, kv = self._get("num_attention_heads"), self._get("num_key_value_heads")
        self.layers = self._get("num_hidden_layers") or 2
        hidden, size = self._get("hidden_size"), self._get("head_dim")
        ratio = max(1, heads // kv) if heads and kv else 1
        single = kv == 1 and heads > 1
        self.kv = 1 if single else 2 if ratio > 1 else 4
        self.heads_number = 4 if single else self.kv * min(ratio, 8)
        apart = bool(size and heads and size * heads != hidden) or LATENT in text
        self.head = head or (HEAD if apart or self.heads_number <= 4 else HEAD // 2)
        self.rotated = ROTARY_HEAD if LATENT in text else self.head
        self.width = WIDTH if apart else self.heads_number * self.head

    def own(self, name: str) -> str:
        """Return the name that the configuration has for a field of transformers."""
        return self._names.get(name, name)

    def _get(self, name: str) -> int:
        value = self._text.get(self.own(name))
        return value if isinstance(value, int) else 0

    def heads(self) -> dict[str, Any]:
        """Return the fields of widths and heads."""
        head = self.rotated
        values = {"hidden_size": self.width, "num_attention_heads": self.heads_number, "num_key_value_heads": self.kv, "head_dim": head}
        values |= {"global_head_dim": 2 * self.head, "num_global_key_value_heads": self.kv, "d_kv": head, "embedding_size": self.width}
        fields = {self.own(name): value for name, value in values.items() if self._text.get(self.own(name)) is not None}
        if "head_dim" in self._text:  # many configurations leave it to their model
            fields["head_dim"] = head
        return fields

    def inner(self) -> dict[str, Any]:
        """Return the fields of the inner widths of feed-forward networks and experts, which may differ from layer to layer."""
        fields = {name: value for name, value in self._text.items() if name.endswith(INNER) and value}
        return {name: [INNER_WIDTH] * len(value) if isinstance(value, list) else INNER_WIDTH for name, value in fields.items()}

    def state_space(self) -> dict[str, Any]:
        """Return the fields of layers that carry a state: their inner width is divided among `STATE_HEADS` heads."""
        text = self._text
        expand = text.get("mamba_expand") or text.get("expand") or 2
        inner = int(expand * self.width)
        names = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_dt_rank", "time_step_rank")
        values = dict.fromkeys(names, STATE_HEADS) | {"mamba_d_ssm": inner}
        values |= dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), inner // STATE_HEADS)
        if text.get("model_type") == "mamba2":
            values |= {"num_heads": STATE_HEADS, "head_dim": inner // STATE_HEADS}
        if "intermediate_size" in text and text.get("model_type") in ("mamba", "falcon_mamba"):
            values |= {"intermediate_size": inner}
        return {name: value for name, value in values.items() if text.get(name) is not None}
