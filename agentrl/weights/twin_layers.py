"""The layers of a twin: the fewest that show every type of layer, and the fields that say which is which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.weights.twin_sizes import HEAD, shrunk

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
