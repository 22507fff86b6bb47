"""Facts about a language model, read from its ``config.json`` or from what transformers made of it; no torch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentrl.assets import tiny_model_path
from agentrl.core.errors import ConfigError

EXACT = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3"})
"""Types of models whose parameters are counted exactly; a test compares with transformers. Others are taken for the most similar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of attention whose keys and values are computed from one narrow vector per token (MLA of DeepSeek-V2 and its kin)."""

    query_rank: int  # width from which queries are computed; 0: from the hidden state
    kv_rank: int  # width of the vector that is cached
    rope_dim: int  # part of a head that carries the position, cached once for all heads
    nope_dim: int  # rest of a head of queries and keys
    value_dim: int  # width of a head of values

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    def layers(self, hidden: int, heads: int) -> list[tuple[int, int]]:
        """Return the widths of the inputs and outputs of the linear layers."""
        wide = heads * self.head_dim
        queries = [(hidden, self.query_rank), (self.query_rank, wide)] if self.query_rank else [(hidden, wide)]
        cached = [(hidden, self.kv_rank + self.rope_dim), (self.kv_rank, heads * (self.nope_dim + self.value_dim))]
        return [*queries, *cached, (heads * self.value_dim, hidden)]

    def parameters(self, hidden: int, heads: int) -> int:
        """Return the parameters of a layer's attention, its norms of the narrow vectors among them."""
        return sum(width * out for width, out in self.layers(hidden, heads)) + self.query_rank + self.kv_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder in which every layer has attention and a gated feed-forward network, or experts of that form."""

    model_type: str  # the architecture, as transformers names it
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int  # heads of keys and values
    head_dim: int
    ffn_width: int  # inner width of the feed-forward network of a layer without experts
    vocabulary: int
    tied: bool = False  # the output layer is the embedding
    qkv_bias: bool = False
    head_norms: bool = False  # queries and keys are normalised per head
    experts: int = 0  # of a layer; 0 for a dense model
    experts_per_token: int = 0
    expert_width: int = 0  # inner width of an expert
    shared_width: int = 0  # inner width of an expert that every token goes through
    shared_gate: bool = False  # a token weighs that expert by a number of its own
    expert_layers: int = 0  # layers that have experts
    max_positions: int = 0  # context length; 0 if unknown
    latent: LatentAttention | None = None
    quantization: str = ""  # method by which the weights of the files are quantised; empty if they are not

    @property
    def exact(self) -> bool:
        """True if `parameters` is the number of parameters to the last one."""
        return self.model_type in EXACT

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self._without_experts + self.expert_layers * self.expert_block

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with: the chosen experts only, and no look-up of the embedding."""
        experts = self.experts_per_token * 3 * self.hidden_size * self.expert_width
        lookup = 0 if self.tied else self.vocabulary * self.hidden_size
        return self._without_experts + self.expert_layers * experts - lookup

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which are as many as those of the output layer."""
        return self.vocabulary * self.hidden_size

    @property
    def kv_width(self) -> int:
        """Numbers that attention of a layer computes as keys and values of a token."""
        return 2 * self.kv_heads * self.head_dim

    def cached_width(self, parallel: int) -> float:
        """Return the numbers that the KV cache of a layer holds for a token on each of `parallel` GPUs.

        Heads are divided, and copied where there are fewer than GPUs; the narrow vector of latent attention is on every GPU.
        """
        if self.latent is not None:
            return float(self.latent.kv_rank + self.latent.rope_dim)
        return self.kv_width / min(parallel, self.kv_heads)

    @property
    def expert_block(self) -> int:
        """Parameters of all experts of a layer."""
        return self.experts * 3 * self.hidden_size * self.expert_width

    @property
    def _without_experts(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.latent is not None:
            attention = self.latent.parameters(self.hidden_size, self.heads)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.head_norms else 0)
        shared = 3 * self.hidden_size * self.shared_width + (self.hidden_size if self.shared_gate else 0)
        dense = (self.layers - self.expert_layers) * 3 * self.hidden_size * self.ffn_width
        routed = self.expert_layers * (self.hidden_size * self.experts + shared)
        embeddings = self.embedding * (1 if self.tied else 2)
        return embeddings + self.hidden_size + self.layers * (attention + bias + norms) + dense + routed


def text_part(config: Any) -> Mapping[str, Any]:
    """Return the settings of the text part of a model, from the contents of a ``config.json`` or from transformers' configuration."""
    if isinstance(config, Mapping):
        return config.get("text_config") or config
    text = config.get_text_config()
    return {**text.to_dict(), **{name: getattr(text, name) for name in text.attribute_map}}


IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Fields with the token in whose places a model puts what it sees of an image."""


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the tokens in whose places a model puts what it sees, that of images first; () for a model that reads text only.

    `config` is as in `text_part`.
    """
    outer: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    image = next((outer[name] for name in IMAGE_TOKENS if outer.get(name) is not None), None)
    if not outer.get("vision_config") or image is None:
        return ()
    video = outer.get("video_token_id")
    return (int(image),) if video is None else (int(image), int(video))


def reads_images(model: str) -> bool:
    """Return True for a model that reads images, as far as its ``config.json`` is on this machine; `model` is as in `read_shape`."""
    path = local_config(model)
    return path is not None and bool(placeholder_ids(json.loads(path.read_text(encoding="utf-8"))))


def prompt_placeholder(config: Any) -> int:
    """Return the token that stands for a whole image in a prompt, as a chat template writes it; `config` is as in `text_part`.

    Raises:
        ValueError: If the model reads text only.
    """
    outer: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    pixels = placeholder_ids(config)
    if not pixels:
        raise ValueError("the model reads text only")
    return int(outer["boi_token_index"]) if outer.get("model_type") == "gemma3" and outer.get("boi_token_index") is not None else pixels[0]


MutualLayers: TypeAlias = Literal["", "sliding", "all"]
"""Layers in which the tokens of an image attend to each other in both directions: none, those with a window, or all."""


def mutual_layers(config: Any) -> MutualLayers:
    """Return in which layers the tokens of an image attend to each other in both directions; `config` is as in `text_part`."""
    outer: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    kind = str(outer.get("model_type", ""))
    if not placeholder_ids(config):
        return ""
    if kind == "gemma3":
        return "all"
    vision = text_part(config).get("use_bidirectional_attention") == "vision"
    return "sliding" if vision and kind == "gemma4" else ""


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return how each layer attends, as transformers calls it; () if the configuration does not say. `config` is as in `text_part`."""
    return tuple(text_part(config).get("layer_types") or ())


def attends_to_everything(config: Any) -> bool:
    """Return True if a token of every layer attends to all tokens before it; `config` is as in `text_part`."""
    if kinds := layer_kinds(config):
        return all(kind == "full_attention" for kind in kinds)
    text = text_part(config)
    # Configurations of Qwen2 name a window also where it is switched off.
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    return window is None and text.get("attention_chunk_size") is None


def max_positions(config: Any) -> int:
    """Return the tokens that a model was made for; 0 if the configuration does not say. `config` is as in `text_part`."""
    return int(text_part(config).get("max_position_embeddings") or 0)


CPU_CONTEXT = 4096
"""Tokens that an engine on a CPU takes at most unless a length is asked for."""


def engine_context(config: Any, *, asked: int, cpu: bool) -> int:
    """Return the context length of an engine for a model; 0 if nothing says one.

    Args:
        config: As in `text_part`.
        asked: ``--max-model-len``.
        cpu: True for an engine on a CPU.
    """
    own = trained_positions(config) or max_positions(config)
    return asked or (min(own or CPU_CONTEXT, CPU_CONTEXT) if cpu else own)


def trained_positions(config: Any) -> int:
    """Return the length up to which a model whose rotary frequencies depend on the length has those of its training; 0 for others.

    `config` is as in `text_part`. For LongRoPE it is the context length that vLLM takes by itself; for dynamic RoPE vLLM takes a
    multiple, and beyond this length its frequencies are not those of transformers.
    """
    text = text_part(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, Mapping) and changes_with_length(part.get("rope_type"))]
    outer = text.get("original_max_position_embeddings")
    before = [part.get("original_max_position_embeddings") or outer for part in parts if part["rope_type"] == "longrope"]
    return int(next(filter(None, before), max_positions(config))) if parts else 0


def changes_with_length(kind: Any) -> bool:
    """Return True for a kind of rotary positions, as transformers calls it, whose frequencies depend on the length of the text."""
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def shape_of(config: Any) -> ModelShape:
    """Read the sizes of a model; `config` is as in `text_part`.

    Raises:
        KeyError: If a size is missing, because the model is of another form.
    """
    text = text_part(config)
    outer: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    kind = str(text.get("model_type", outer.get("model_type", "")))
    heads = int(text["num_attention_heads"])
    hidden = int(text["hidden_size"])
    layers = int(text["num_hidden_layers"])
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    return ModelShape(
        model_type=kind,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=latent.head_dim if (latent := _latent(text)) is not None else int(text.get("head_dim") or hidden // heads),
        ffn_width=int(text.get("intermediate_size") or 4 * hidden),
        vocabulary=int(text["vocab_size"]),
        # Files leave out what is the default of transformers' class: output layers of Gemma are tied, queries of Qwen2 have a bias.
        tied=bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", kind.startswith("gemma")))),
        qkv_bias=bool(text.get("attention_bias", kind in ("qwen2", "qwen2_moe"))),
        head_norms=kind.startswith(("qwen3", "gemma3")) or bool(text.get("use_qk_norm")),
        experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
        expert_width=int(text.get("moe_intermediate_size") or text["intermediate_size"]) if experts else 0,
        shared_width=_shared_width(text) if experts else 0,
        shared_gate=bool(experts and text.get("shared_expert_intermediate_size")),
        expert_layers=_expert_layers(text, layers) if experts else 0,
        max_positions=max_positions(text),
        latent=latent,
        quantization=str((outer.get("quantization_config") or text.get("quantization_config") or {}).get("quant_method", "")),
    )


def _shared_width(text: Mapping[str, Any]) -> int:
    single = int(text.get("shared_expert_intermediate_size") or 0)
    return single or int(text.get("n_shared_experts") or 0) * int(text.get("moe_intermediate_size") or 0)


def _latent(text: Mapping[str, Any]) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(text.get("q_lora_rank") or 0),
        kv_rank=int(text["kv_lora_rank"]),
        rope_dim=int(text["qk_rope_head_dim"]),
        nope_dim=int(text["qk_nope_head_dim"]),
        value_dim=int(text["v_head_dim"]),
    )


def _expert_layers(text: Mapping[str, Any], layers: int) -> int:
    every, dense = int(text.get("decoder_sparse_step") or 1), text.get("mlp_only_layers") or ()
    first = int(text.get("first_k_dense_replace") or 0)
    return sum(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(layers))


def read_shape(model: str) -> ModelShape | None:
    """Return the sizes of a model without asking a network; `None` if they are not to be found on this machine, or of another form.

    `model` is a directory, a ``config.json`` file, a name of the hub whose file is in the cache, or "" for the bundled model.
    """
    path = local_config(model)
    if path is None:
        return None
    try:
        return shape_of(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError, OSError):
        return None


def find_shape(model: str) -> ModelShape:
    """Return the sizes of a model as `read_shape` does, after asking the hub for the file where it is not on this machine.

    Raises:
        ConfigError: If there is no such file, or the model is of another form.
    """
    path, remedy = local_config(model), "Give a directory of a Hugging Face model, its config.json, or a name of the hub."
    try:
        if path is None:
            path = _downloaded(model)
        return shape_of(json.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        raise ConfigError("--model", model, f"its config.json has no {error}, so its sizes are unknown", remedy) from error
    except Exception as error:  # the hub's client raises those of its transport, which differ between its versions
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError("--model", model, f"its config.json cannot be read: {reason}", remedy) from error


@cache
def local_config(model: str) -> Path | None:
    """Return the ``config.json`` of a model without asking a network, as `read_shape` finds it; `None` if it is not on this machine."""
    path = Path(model).expanduser() if model else tiny_model_path()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    # The cache may also know that the hub has no such file, and says so by an object.
    return Path(found) if isinstance(found, str) else None


def _downloaded(model: str) -> Path:
    path = Path(model).expanduser()
    if path.exists() or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise FileNotFoundError(f"there is no {path / 'config.json' if path.is_dir() else path}")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json", etag_timeout=10))
