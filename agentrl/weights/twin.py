"""The twin of a model: its class with a few narrow layers and random weights, made from the configuration alone.

A twin keeps everything that decides how a token is computed: types of layers, ratio of heads, form of the experts and of their router,
kind of rotary embedding, soft caps, multipliers, dropout. Sizes shrink, and so do windows, chunks and thresholds of positions, so that
rows of a few dozen tokens lie on both sides of them. Its layers are the fewest that show every type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import changes_with_length, placeholder_ids
from agentrl.core.tokenizers import quiet_transformers
from agentrl.weights.rope import fix_rope
from agentrl.weights.twin_images import drawn_images, vision_twin_config
from agentrl.weights.twin_sizes import HEAD, LATENT, VOCABULARY, Sizes, is_kept, shrunk

MOST_LAYERS = 4
PERIODS = ("decoder_sparse_step", "interleave_moe_layer_step", "attn_layer_period", "expert_layer_period", "full_attention_interval")
"""Fields with the number of layers after which a type of layers comes again."""
PLACES = ("moe_layers", "mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids")
"""Fields that list the numbers of layers of a type."""
PER_LAYER = "per_layer_config"
"""Field with the settings of single layers by their numbers."""
PATTERN = "hybrid_override_pattern"
"""Field that has a letter for every layer."""
OFFSETS = ("attn_layer_offset", "expert_layer_offset")
"""Fields with the number of the first layer of a type that comes again and again."""


def layer_fields(text: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the fields of a twin that say which layer is of which type; at least two layers, at most `MOST_LAYERS`.

    Args:
        text: Configuration of the model.
        count: Its number of layers.
    """
    dense = int(text.get("first_k_dense_replace") or 0)
    columns = {name: value for name, value in text.items() if name not in PLACES and _is_column(name, value, count)}
    places = {name: set(text[name]) for name in PLACES if isinstance(text.get(name), list)}
    periods = {name: min(int(text[name]), 2) for name in PERIODS if text.get(name)}
    kinds = [
        (*(_key(value[layer]) for value in columns.values()), *(layer in value for value in places.values()), layer < dense)
        for layer in range(count)
    ]
    again = bool(text.get("num_kv_shared_layers")) or any(period > 1 for period in periods.values())
    chosen = _at_least_two(_representatives(kinds), again=again)
    fields: dict[str, Any] = {name: _picked(value, chosen) for name, value in columns.items()}
    fields |= {name: [at for at, layer in enumerate(chosen) if layer in value] for name, value in places.items()}
    fields |= periods | {name: 1 for name in OFFSETS if text.get(name)}
    if own := text.get(PER_LAYER):
        fields[PER_LAYER] = _own_settings(own, chosen)
    if dense:
        fields["first_k_dense_replace"] = sum(layer < dense for layer in chosen)
    return fields | {"num_hidden_layers": len(chosen)}


def _at_least_two(chosen: list[int], *, again: bool) -> list[int]:
    """Return the chosen layers, all of them `again` if later ones use what earlier ones computed, or types alternate."""
    if again:
        return (chosen * MOST_LAYERS)[:MOST_LAYERS]
    return chosen * 2 if len(chosen) == 1 else chosen


def _own_settings(own: Mapping[Any, Mapping[str, Any]], chosen: Sequence[int]) -> dict[int, dict[str, Any]]:
    settings = {int(layer): value for layer, value in own.items()}
    return {
        at: {name: 2 * HEAD if name == "head_dim" else shrunk(name, value) for name, value in settings[layer].items()}
        for at, layer in enumerate(chosen)
        if layer in settings
    }


def _is_column(name: str, value: Any, count: int) -> bool:
    """Return True for a field with an entry for every layer."""
    return bool(value) and (name == PATTERN or (isinstance(value, list | tuple) and len(value) == count > 1))


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


POSITIONS = 512
TRAINED = 128
"""Context of its training where the frequencies of positions change beyond it. Runs stay within it unless asked, and so do all rows."""
ROW = 72
"""Tokens that go far beyond every window, chunk and threshold of a twin."""
STD = 0.15
"""Standard deviation of the weights; with that of a fresh model, 0.02, all tokens would be about equally likely, which hides errors."""
LARGEST = 20_000_000
"""Most parameters of a twin; one that has more was not understood."""


def model_class(config: Any, *, name: str = "") -> Any:
    """Return the class of the causal language model with this configuration.

    Raises:
        ConfigError: If transformers has none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    found = next((kind._model_mapping[type(config)] for kind in kinds if type(config) in kind._model_mapping), None)
    # transformers lists some models of text, as Mistral4ForCausalLM, among those that read images alone.
    if found is None or not (
        placeholder_ids(config) or type(config) in AutoModelForCausalLM._model_mapping or "CausalLM" in found.__name__
    ):
        kind = name or config.model_type
        raise ConfigError("MODEL", kind, "is no type of causal language models of transformers", "Models of this type cannot be tried.")
    return found


def twin_config(config: Any, *, head: int = 0) -> Any:
    """Return the configuration of the twin of a model with the configuration `config`; with `head` its heads have this size."""
    if placeholder_ids(config):
        return vision_twin_config(config, twin_config(config.get_text_config(), head=head))
    real = {name: value for name, value in config.to_dict().items() if is_kept(name)}
    sizes = Sizes(real, config.attribute_map, head)
    layers = {sizes.own(name): value for name, value in layer_fields(real, sizes.layers).items()}
    fields = {name: shrunk(name, value) for name, value in real.items()} | layers | _special_tokens(real)
    fields |= sizes.heads() | Sizes(fields, config.attribute_map).inner() | sizes.state_space()
    fields |= _positions(real, sizes.own("max_position_embeddings")) | _rotary(real, sizes.rotated)
    with quiet_transformers():
        return type(config)(**fields)


def twin_of(model: nn.Module) -> Any:
    """Return the twin of a causal language model of transformers, which attends by its own code; `None` if it cannot be built.

    That of a model that reads images does too (`agentrl.weights.twin_images`), or is that of its text part.

    How the model computes is proven on it (rows that see each other, a kernel that leaves out what layers ask for) in a fraction of a
    second, whatever the size of the model.
    """
    config: Any = model.config
    with suppress(Exception):  # code of any model's author: a vision part that is not known here
        if placeholder_ids(config):
            made = _frozen(twin_config(config), type(model))
            drawn_images(made)
            return made
    text = config.get_text_config()
    try:
        # The twin of a reward model is the language model of its family.
        own = text.model_type == config.model_type and model.get_output_embeddings() is not None  # type: ignore[operator]
        return _frozen(twin_config(text), type(model) if own else model_class(text))
    except Exception:  # code of any model's author: a configuration in other words, or sizes that do not go together
        return None


def twin_reads_images(config: Any) -> bool:
    """Return True if a twin that reads images can be built of a model with this configuration."""
    if not placeholder_ids(config):
        return False
    try:
        with torch.random.fork_rng(devices=[]):
            drawn_images(build_twin(twin_config(config)))
    except Exception:  # code of any model's author: a vision part that is not known here
        return False
    return True


def _frozen(config: Any, kind: Any) -> Any:
    # `build_twin` sets the global seed of PyTorch, and the later draws of the run on the CPU must not change by that.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        made = build_twin(config, kind).eval().requires_grad_(False)
        fix_rope(made, POSITIONS)
        return made


def build_twin(config: Any, kind: Any = None, *, seed: int = 0) -> Any:
    """Return the model of a twin's configuration with random weights, the same for the same seed, in float32.

    Args:
        config: Configuration of the twin.
        kind: Class of the model; that of transformers for the configuration by default.
        seed: Of the weights.

    Raises:
        ConfigError: If it has too many parameters, or transformers has no class for it.
    """
    torch.default_generator.manual_seed(seed)  # that of the CPU alone: `torch.manual_seed` would begin those of GPUs anew as well
    kind = kind or model_class(config)
    with quiet_transformers():
        # Counted before any memory is taken: a configuration that is not understood may keep billions of parameters.
        with torch.device("meta"):
            size = parameters_of(kind._from_config(config, attn_implementation="eager"))
        if size > LARGEST:
            problem = f"is of a form whose twin would have {size:,} parameters"
            raise ConfigError("MODEL", config.model_type, problem, "Models of this type cannot be tried.")
        model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if parameter is embedding and not getattr(config, "tie_word_embeddings", True) else STD
                parameter.normal_(0.0, scale, generator=generator)
            elif name.rpartition(".")[2] in ("bias", "sinks", "weight"):
                # Fresh norms are 1 and fresh biases 0, so code that leaves one of them out would not be noticed.
                parameter.add_(torch.empty_like(parameter).normal_(0.0, STD, generator=generator))
    return model


def _special_tokens(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of special tokens, moved to the end of the vocabulary."""
    found: dict[str, Any] = {}
    for name, value in text.items():
        if name.endswith(("_token_id", "_token_index")) and value is not None:
            found[name] = VOCABULARY - 1 if isinstance(value, list) or value >= VOCABULARY else value
    return found


def _positions(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the longest context: a threshold of the rotary embedding where that is what it is, else enough for every row."""
    if text.get(name) is None:
        return {}
    parameters = text.get("rope_parameters") or {}
    every = [part for part in (parameters, *parameters.values()) if isinstance(part, Mapping)]
    kinds = {part.get("rope_type") for part in every}
    if "dynamic" in kinds:
        return {name: TRAINED}
    if "longrope" in kinds:
        before = [part.get("original_max_position_embeddings") or 0 for part in (text, *every)]
        own = {"original_max_position_embeddings": TRAINED} if text.get("original_max_position_embeddings") else {}
        return {name: TRAINED * max(2, text[name] // max(1, *before)), **own}
    return {name: POSITIONS}


def _rotary(text: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Return the parameters of the rotary embedding with shrunk thresholds, and as many factors as heads of the size `head` have."""

    def parameters(value: Mapping[str, Any]) -> dict[str, Any]:
        half = int(head * float(value.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0)) // 2
        own = {name: parameters(part) if isinstance(part, Mapping) else _rotary_field(name, part, half) for name, part in value.items()}
        trained = {"original_max_position_embeddings": TRAINED} if changes_with_length(value.get("rope_type") or value.get("type")) else {}
        # The heads of a twin with latent attention are as wide as the part of them that is rotated.
        whole = {"partial_rotary_factor": 1.0} if LATENT in text and text.get("head_dim") else {}
        return own | {name: part for name, part in (trained | whole).items() if own.get(name)}

    return {name: parameters(text[name]) for name in ("rope_parameters", "rope_scaling") if isinstance(text.get(name), Mapping)}


def _rotary_field(name: str, value: Any, half: int) -> Any:
    if name in ("long_factor", "short_factor"):
        return [value[at * len(value) // half] for at in range(half)]
    if name == "mrope_section":
        others = [half * share // sum(value) for share in value[1:]]
        return [half - sum(others), *others]
    return shrunk(name, value)


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
