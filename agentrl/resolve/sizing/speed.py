"""Speed of GPUs: what data sheets say, what machines have measured, and the shares of it that training and generation reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.algo.teacher_specs import learner_teacher
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import ModelShape, read_shape
from agentrl.resolve.sizing.memory import GIB, EnginePlan, adapter_parameters, number_bytes, offloaded_bytes, served_bytes
from agentrl.resolve.sizing.rates import read_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of GPU."""

    memory_gib: float  # that its driver reports
    tflops: float  # dense matrix products of bfloat16 that are summed in float32, 1e12 operations per second
    gb_per_s: float  # its memory, 1e9 bytes per second
    measured: bool = False  # on a machine, rather than read from a data sheet


CARDS: Mapping[str, Card] = {
    "a100": Card(memory_gib=79.3, tflops=312, gb_per_s=2039),
    "h100": Card(memory_gib=79.6, tflops=989, gb_per_s=3350),
    "h200": Card(memory_gib=140.4, tflops=989, gb_per_s=4800),
    "b200": Card(memory_gib=179.1, tflops=2250, gb_per_s=7700),
    "4090": Card(memory_gib=24.0, tflops=165, gb_per_s=1008),
    "5090": Card(memory_gib=31.8, tflops=210, gb_per_s=1792),
    "l40s": Card(memory_gib=45.0, tflops=362, gb_per_s=864),
}
"""GPUs by name, from NVIDIA's data sheets: the SXM forms of A100 (80 GB), H100, H200 and B200, without sparsity."""


def card_named(name: str) -> Card:
    """Return the speed of a kind of GPU: as ``agentrl doctor`` measured it on a device of that name, else as the data sheet says.

    Raises:
        ConfigError: If neither knows it.
    """
    sheet = CARDS.get(name.lower())
    for device, rates in read_rates().items():
        if name.lower() in device.lower() and rates.matmul_bfloat16 and rates.memory:
            memory = rates.device_bytes / GIB if rates.device_bytes else sheet.memory_gib if sheet else 0.0
            return Card(memory_gib=memory, tflops=rates.matmul_bfloat16 / 1e12, gb_per_s=rates.memory / 1e9, measured=True)
    if sheet is None:
        remedy = f"Choose one of {', '.join(CARDS)}, or run agentrl doctor on a machine with it, which keeps its rates."
        raise ConfigError("--gpu", name, "is not known, and no device of that name was measured", remedy)
    return sheet


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds between the fewest and the most that are likely."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        """Return the range of the sum."""
        return Range(self.low + other.low, self.high + other.high)

    def longer(self, other: Range) -> Range:
        """Return the range of the longer of two things that happen side by side."""
        return Range(max(self.low, other.low), max(self.high, other.high))

    def times(self, factor: float) -> Range:
        """Return the range of so many."""
        return Range(self.low * factor, self.high * factor)

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return math.sqrt(self.low * self.high)

    def __str__(self) -> str:
        """Return both ends, or the one value."""
        low, high = f"{self.low:.3g}", f"{self.high:.3g}"
        return low if low == high else f"{low} to {high}"


SHEET_SHARES, MEASURED_SHARES = (0.2, 0.45), (0.3, 0.65)
"""Shares of the rate of matrix products, of a data sheet and measured, that a learner reaches, assumed."""
SHEET_DECODING, MEASURED_DECODING = (0.35, 0.75), (0.4, 0.85)
"""Shares of the speed at which weights and cache could be read that an engine reaches, assumed."""
GATHER_GB_PER_S = (25.0, 200.0)
"""Parameters that ZeRO-3 gathers, between machines and within one, assumed."""
PCIE_GB_PER_S = (10.0, 40.0)
"""State that moves between GPU and CPU memory where engine and learner take turns, assumed."""
CPU_ADAM_S = (0.5, 4.6)
"""Seconds of an optimizer step in CPU memory for 1e9 parameters: measured with one thread, and assumed with many."""
START_TOKENS = 512
"""Tokens of a micro-batch whose time is lost to its start, assumed."""


def over(amount: float, shares: tuple[float, float]) -> Range:
    """Return the seconds that `amount` takes at the rates between both `shares`."""
    return Range(amount / shares[1], amount / shares[0])


def pass_flops(shape: ModelShape, length: int) -> int:
    """Return the floating-point operations of a forward pass for a token of a row of `length` tokens; a backward pass takes twice that."""
    return 2 * shape.active_parameters + 2 * shape.layers * shape.heads * shape.head_dim * length


def step_flops(config: TrainConfig, shape: ModelShape, episode_tokens: int) -> float:
    """Return the floating-point operations of training on a step's episodes, those of all ranks.

    A token takes 6 per parameter that it meets, 8 if activations are computed again, and 2 for each further pass of a frozen model; without
    gradients of the weights, as beside an adapter, 2 less. Attention is added.
    """
    algo = config.algo
    token = _passes(config) * pass_flops(shape, episode_tokens)
    if (model := learner_teacher(algo.teacher)) and (teacher := read_shape(model)) is not None:
        token += pass_flops(teacher, episode_tokens)
    return float(token * _step_tokens(config, episode_tokens))


def train_seconds(config: TrainConfig, shape: ModelShape, episode_tokens: int, rate: tuple[float, float]) -> Range:
    """Return the seconds of training on a step's episodes, where a rank computes at `rate`: operations per second, the least and the most.

    The cost of small micro-batches, of gathering, and of an optimizer in CPU memory is added.
    """
    learner, tokens = config.learner, _step_tokens(config, episode_tokens)
    micro = max(learner.micro_batch_tokens, episode_tokens)
    seconds = over(step_flops(config, shape, episode_tokens) * (1 + START_TOKENS / micro) / learner.num_learners, rate)
    if learner.zero_stage == 3 and learner.num_learners > 1:
        gathers = math.ceil(tokens / micro / learner.num_learners) * _passes(config)
        seconds += over(gathers * shape.parameters * number_bytes(config) / 1e9, GATHER_GB_PER_S)
    if "optimizer" in learner.offload:
        updates = config.algo.ppo_epochs * config.algo.mini_batches
        trained = adapter_parameters(shape, config.lora.lora_rank) or shape.parameters
        seconds += Range(*CPU_ADAM_S).times(trained / learner.num_learners / 1e9 * updates)
    return seconds


def _passes(config: TrainConfig) -> int:
    """Return how often a token goes through the model, a backward pass counted as two."""
    passes = (4 if config.learner.gradient_checkpointing else 3) - bool(config.lora.lora_rank)
    return passes * config.algo.ppo_epochs + bool(config.algo.init_kl_coef)


def _step_tokens(config: TrainConfig, episode_tokens: int) -> int:
    return episode_tokens * config.flow.groups_per_step * config.sampling.n_samples_per_prompt


def turn_seconds(config: TrainConfig, shape: ModelShape) -> Range:
    """Return the seconds in which the state of a learner that takes turns with its engine leaves the GPU and comes back."""
    return over(2 * offloaded_bytes(config, shape) / 1e9, PCIE_GB_PER_S) if config.weights.sleeps else Range(0.0, 0.0)


def decode_rate(config: TrainConfig, shape: ModelShape, engine: EnginePlan, card: Card, tokens: tuple[int, int]) -> tuple[float, float]:
    """Return the tokens per second of an engine on such GPUs, the least and the most.

    A decoding step reads the weights, of experts those that any sequence goes to, and the cache of all sequences; or it is as long as its
    products where those take longer. As many sequences are decoded as there are, and as the cache holds.

    Args:
        config: The settings.
        shape: Sizes of the model.
        engine: Its plan.
        card: The GPUs.
        tokens: Of a prompt, and of an answer, half of which is there on average.
    """
    prompt, answer = tokens
    context = prompt + answer / 2
    episodes = config.flow.groups_per_step * config.sampling.n_samples_per_prompt / config.engine.num_engines
    sequences = max(1.0, min(config.engine.max_num_seqs, episodes, engine.cache_tokens / context))
    weights = engine.weights
    if shape.experts:
        # Expected share of the experts that at least one sequence goes to, if each sequence chooses by chance.
        apart = 1 - (1 - shape.experts_per_token / shape.experts) ** sequences
        experts = served_bytes(config, shape) * shape.expert_layers * shape.expert_block / shape.parameters / config.engine.gpus_per_engine
        weights -= experts * (1 - apart)
    read = (weights + sequences * context * engine.token_bytes) / (card.gb_per_s * 1e9)
    computed = sequences * pass_flops(shape, round(context)) / (card.tflops * 1e12 * config.engine.gpus_per_engine)
    rate = sequences / max(read, computed)
    low, high = MEASURED_DECODING if card.measured else SHEET_DECODING
    return rate * low, rate * high


def learner_rate(card: Card) -> tuple[float, float]:
    """Return the operations per second of a learner rank on such a GPU, the least and the most."""
    low, high = MEASURED_SHARES if card.measured else SHEET_SHARES
    return card.tflops * 1e12 * low, card.tflops * 1e12 * high
