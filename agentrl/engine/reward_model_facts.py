"""Facts about a reward model from its files; nothing heavy is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError

FLAG = "--reward-model"
HEADS = ("score", "value_head", "reward_head", "v_head")
"""Names that systems give to the layer that makes a score of the last hidden state; transformers writes ``score``."""
NAMED_HEAD = "name its layer as value_head_prefix in its config.json"
"""Remedy for a reward model whose head has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFacts:
    """Facts about a reward model from its files."""

    head: str = "score"  # name of the layer that makes the score
    per_step: bool = False  # it is a process reward model
    scale: tuple[float, float] | None = None  # mean and standard deviation of its scores, where its config.json states them


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings:
    """Settings of one reward model."""

    model: str  # directory or hub name
    policy: str = ""  # model whose chat template rendered the texts; empty: they are taken as texts for this model

    device: str = "cpu"
    dtype: str = "auto"  # float32, bfloat16, or auto: float32 on CPU, bfloat16 elsewhere
    batch_size: int = 64  # texts that go through the model at once
    max_tokens: int = 0  # tokens that are read, the last ones of a longer text; 0: the context length of the model
    trust_remote_code: bool = False
    as_messages: bool = False  # texts come as chat messages


def reward_model_facts(model: str, name: str = FLAG) -> RewardModelFacts:
    """Return what the files of a model say; a hub name without files here gives the defaults.

    Args:
        model: Directory or hub name.

        name: The flag that named the model, for messages.

    Raises:
        ConfigError: If the directory holds no reward model; the remedy says what it holds.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and not model.startswith((".", "/", "~")) and len(model.split("/")) <= 2:
        return RewardModelFacts()
    if not (folder / "config.json").is_file():
        if holds_adapter(folder):
            raise ConfigError(name, model, "holds an adapter without its model", f"Write the whole model: agentrl merge {model} OUT.")
        raise ConfigError(name, model, "holds no config.json", "Give a Hugging Face directory, or a hub name like `org/name`.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = str(next(iter(config.get("architectures") or ()), ""))
    per_step = kind.endswith("ForTokenClassification")
    try:
        shapes = tensor_shapes(folder)
    except (ValueError, OverflowError, MemoryError) as error:  # its first bytes are no length, as in a pointer of Git LFS
        raise ConfigError(name, model, "has weights that cannot be read", "Get its safetensors files again.") from error
    candidates = (*filter(None, [config.get("value_head_prefix")]), *HEADS)
    found = next((part for part in candidates if f"{part}.weight" in shapes), None)
    if found is None:
        problem = f"has no head that makes a score ({kind or 'no architecture'})"
        raise ConfigError(name, model, problem, f"Train one with agentrl reward-model, or {NAMED_HEAD}.")
    size = shapes[f"{found}.weight"][0]
    if size != (2 if per_step else 1):
        problem = f"its head {found}.weight has {size} outputs, and a reward model has {'2, wrong and right' if per_step else '1'}"
        raise ConfigError(name, model, problem, "Train it with num_labels=1 (agentrl reward-model does), or choose another model.")
    scale = (float(config["mean"]), float(config["std"])) if {"mean", "std"} <= config.keys() else None
    return RewardModelFacts(head=found, per_step=per_step, scale=scale)


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in the safetensors files of a directory, from their headers."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            # A safetensors file begins with the length of its header, in eight bytes.
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes.update({key: entry["shape"] for key, entry in header.items() if key != "__metadata__"})
    return shapes
