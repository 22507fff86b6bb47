"""Defaults that depend on the size of the model, filled in where a user says nothing; they come from its ``config.json`` alone."""

from __future__ import annotations

from typing import Any

from agentrl.config.engine_rules import lacks
from agentrl.config.schema import TrainConfig
from agentrl.core.model_shape import ModelShape, read_shape, reads_images
from agentrl.core.process import num_gpus
from agentrl.core.settings import flag
from agentrl.engine.facts import ENGINES, installed_engine

MEDIUM, LARGE, HUGE = 5e7, 5e8, 2e10
"""Parameters from which a model is taken for pretrained, for a large one, and for one that needs smaller micro-batches."""

SIZED = ("learning_rate", "critic_learning_rate", "gradient_checkpointing", "micro_batch_tokens", "max_new_tokens")
"""Settings whose default depends on the model."""

ADAPTER_FACTOR = 10
"""Times the learning rate of a pretrained model that an adapter beside it is trained with (Schulman et al., LoRA Without Regret, 2025)."""

ADAPTER_RATE = 2e-3
"""Learning rate of an adapter beside the bundled model."""

TINY = 10_000_000
"""Parameters below which a training run on a CPU takes the engine of transformers by itself."""

SMALL = "transformers"
"""The engine of such runs."""

LONG_ANSWER = 1024
DESTRUCTIVE = 20
"""Times the default learning rate from which a pretrained model is likely to be destroyed."""


def defaults_of(config: TrainConfig) -> dict[str, Any]:
    """Return the defaults of `SIZED` for the model of `config` that are others than those of the bundled model.

    A model whose sizes are not on this machine is taken for a large one, since these values do no harm to a small one. With ``--lora-rank``
    the learning rates are those of adapters.
    """
    sized = _by_size(config)
    if not config.lora.lora_rank:
        return sized
    if not sized:
        return {"learning_rate": ADAPTER_RATE}
    return sized | {name: round(ADAPTER_FACTOR * sized[name], 12) for name in ("learning_rate", "critic_learning_rate")}


def _by_size(config: TrainConfig) -> dict[str, Any]:
    shape = _shape(config)
    size = LARGE if shape is None else shape.parameters
    if size < MEDIUM:
        return {}
    if size < LARGE:
        return {"learning_rate": 1e-5, "critic_learning_rate": 1e-4}
    context = config.engine.max_model_len or (0 if shape is None else shape.max_positions) or 2 * LONG_ANSWER
    sized = {"learning_rate": 1e-6, "critic_learning_rate": 1e-5, "gradient_checkpointing": True}
    return sized | {"max_new_tokens": max(1, min(LONG_ANSWER, context // 2))} | ({"micro_batch_tokens": 8192} if size >= HUGE else {})


def described(config: TrainConfig) -> str:
    """Return the settings that follow from the model and where they come from; "" for a model that trains with the plain defaults."""
    expected = defaults_of(config)
    if not expected:
        return ""
    shape, shown = _shape(config), []
    for section in (config.learner, config.rollout):
        for name in SIZED:
            value = getattr(section, name, None)
            if name in expected and value is not None:
                text = f"{flag(name)} {value:g}" if not isinstance(value, bool) else flag(name if value else f"no_{name}")
                shown.append(text + ("" if value == expected[name] else " (given)"))
    size = "a model whose size is not known yet" if shape is None else f"{shape.parameters / 1e9:.3g}e9 parameters"
    return f"for {size}: {', '.join(shown)}"


def rate_warning(config: TrainConfig) -> tuple[str, str] | None:
    """Return a warning about a learning rate that will destroy a pretrained model, and the remedy; `None` for one that will not."""
    usual, rate = defaults_of(config).get("learning_rate"), config.learner.learning_rate
    if usual is None or _shape(config) is None or rate < DESTRUCTIVE * usual:
        return None
    problem = f"--learning-rate {rate:g} is {rate / usual:.0f} times the default for a model of this size"
    return f"{problem} and is likely to destroy what it has learned", f"Use about {usual:g}"


def _shape(config: TrainConfig) -> ModelShape | None:
    return read_shape(config.model.model)


def settled_engine(config: TrainConfig) -> tuple[str, str]:
    """Return the engine that ``--engine auto`` stands for: transformers for a tiny model on a CPU, with a line that says why.

    A step of vLLM costs more Python than such a model costs arithmetic: docs/engines.md has the figures, and `tests.benchmarks.engine_cost`
    measures them. They are of a dense model of text, so a model of another form, or one whose sizes are unknown, keeps vLLM. So do flags
    that need it, and a cluster that is joined, whose machines are not known yet.
    """
    # A rule and no measurement at each start, because vLLM alone takes longer to load than such a measurement.
    shape, usual = _shape(config), installed_engine()
    if usual == SMALL or shape is None:
        return usual, ""
    common = shape.exact and not shape.experts and not shape.quantization and not reads_images(config.model.model)
    elsewhere = bool(config.run.ray_address) or num_gpus(config.run.device) > 0
    if shape.parameters >= TINY or not common or elsewhere or any(lacks(config, ENGINES[SMALL])):
        return usual, ""
    return SMALL, f"engine {SMALL}, for {shape.parameters / 1e6:.2g} million parameters on a CPU (--engine vllm takes vLLM)"
