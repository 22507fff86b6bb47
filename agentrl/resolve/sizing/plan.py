"""A plan of a run before it costs anything: what fits into the memory of the GPUs, and how long a step takes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from agentrl.config.engine_rules import num_engines
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.model_shape import ModelShape
from agentrl.core.settings import Count, NonNegative
from agentrl.resolve.sizing.memory import (
    CONTEXT,
    ENGINE_EXTRA,
    GIB,
    EnginePlan,
    engine_plan,
    host_bytes,
    learner_parts,
    offloaded_bytes,
    parts_beside_engine,
    served_bytes,
)
from agentrl.resolve.sizing.speed import Card, Range, decode_rate, learner_rate, over, train_seconds, turn_seconds

FULL, HANDING_OVER = "a learner rank needs", "the weights of a learner rank and of its engine need"
"""Beginnings of sentences about what does not fit."""
SPARE = 0.95
"""Share of a GPU's memory that a plan may fill; the rest is lost between the pieces that an allocator hands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """GPUs that a run has to fit into."""

    gpus: int
    gpu_bytes: float
    gpus_per_node: int = 8  # of one machine
    host_bytes: float = 0.0  # CPU memory of one machine; 0 if unknown
    card: Card | None = None  # their speed, if it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Episodes of a step, and measured rates; a rate of 0 is unknown."""

    prompt_tokens: Count = 512
    """Tokens of a typical prompt."""
    answer_tokens: Count = 1024
    """Tokens that are sampled in a typical episode."""
    learner_tflops: NonNegative = 0.0
    """Measured speed of a learner rank, 1e12 floating-point operations per second. 0: as the GPU's speed lets expect, if that is known."""
    decode_tokens_per_s: NonNegative = 0.0
    """Measured speed of an engine with many episodes, tokens per second. 0: as the GPU's speed lets expect, if that is known."""

    @property
    def episode_tokens(self) -> int:
        """Tokens of a typical episode, prompt and answer."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory of a run with certain settings."""

    config: TrainConfig
    sized: TrainConfig  # the same with the memory that engines leave to learner ranks, where they share GPUs
    shape: ModelShape
    hardware: Hardware
    parts: Mapping[str, float]  # bytes by name on the busiest learner rank's GPU
    engine: EnginePlan
    episode_tokens: int

    @property
    def learner_bytes(self) -> float:
        """Bytes on the GPU of the busiest learner rank."""
        return sum(self.parts.values())

    @property
    def gpus(self) -> int:
        """GPUs that the settings ask for."""
        ranks = self.config.learner.num_learners
        return ranks if self.config.weights.colocate else ranks + num_engines(self.config) * self.config.engine.gpus_per_engine

    @property
    def host_bytes(self) -> float:
        """Bytes of CPU memory on the machine of the first learner rank."""
        return machine_bytes(self.config, self.shape, self.hardware.gpus_per_node)

    @property
    def episodes(self) -> int:
        """Episodes that the caches of all engines hold at once."""
        return self.config.engine.num_engines * (self.engine.cache_tokens // self.episode_tokens)

    @property
    def problems(self) -> list[str]:
        """Sentences about what does not fit."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        limit = SPARE * self.hardware.gpu_bytes
        config, engine, weights = self.sized, self.sized.engine, self.sized.weights
        if weights.sleeps:  # it keeps its process
            limit -= ENGINE_EXTRA
            yield from self._handing_over()
        elif weights.colocate:
            limit -= self.hardware.gpu_bytes * engine.memory_share(weights, self.hardware.gpu_bytes)
        if self.learner_bytes > limit * (1 + 1e-9):  # where both stay, the limit is these bytes, but for the rounding of their share
            yield f"{FULL} {self.learner_bytes / GIB:.1f} GiB of the {limit / GIB:.1f} that it may fill"
        least = (
            config.sampling.n_samples_per_prompt if weights.colocate and not weights.sleeps else 1
        )  # where both stay, a group is the least
        if self.engine.cache_tokens < least * self.episode_tokens:
            holds = "no whole episode" if least == 1 else f"fewer than {least} episodes of {self.episode_tokens:,} tokens"
            yield f"an engine has {max(0.0, self.engine.cache) / GIB:.1f} GiB per GPU left for its KV cache, which holds {holds}"
        if engine.gpus_per_engine > self.hardware.gpus_per_node:
            machine = f"a machine has {self.hardware.gpus_per_node} (--gpus-per-node)"
            yield f"an engine of {engine.gpus_per_engine} GPUs has to be on one machine, and {machine}"
        if self.gpus > self.hardware.gpus:
            yield f"engines and learner ranks need {self.gpus} GPUs, and there are {self.hardware.gpus}"
        if self.hardware.host_bytes and self.host_bytes > self.hardware.host_bytes:
            needed, there = self.host_bytes / GIB, self.hardware.host_bytes / GIB
            yield f"what is kept in CPU memory needs {needed:.1f} GiB of the {there:.1f} of a machine"

    def _handing_over(self) -> Iterator[str]:
        """Yield a sentence if the weights of both do not fit while they go from a learner rank to its engine."""
        there = {"parameters", "for the engines", *parts_beside_engine(self.sized, self.parts)}
        needed = sum(size for name, size in self.parts.items() if name in there) + CONTEXT + self.engine.weights + ENGINE_EXTRA
        limit = SPARE * self.hardware.gpu_bytes
        if needed > limit:
            yield f"{HANDING_OVER} {needed / GIB:.1f} GiB of {limit / GIB:.1f} during a publication"


def make_plan(config: TrainConfig, shape: ModelShape, hardware: Hardware, work: Workload) -> Plan:
    """Compute the memory of a run."""
    groups = config.flow.groups_per_step * config.sampling.n_samples_per_prompt
    parts = learner_parts(config, shape, step_tokens=groups * work.answer_tokens, row_tokens=work.episode_tokens)
    sized = config
    if config.weights.colocate and not config.weights.learner_memory_gib:
        sized = changed(config, learner_memory_gib=sum(parts_beside_engine(config, parts).values()) / GIB)
    return Plan(
        config=config,
        sized=sized,
        shape=shape,
        hardware=hardware,
        parts=parts,
        engine=engine_plan(sized, shape, hardware.gpu_bytes),
        episode_tokens=work.episode_tokens,
    )


def divide(config: TrainConfig, shape: ModelShape, hardware: Hardware, given: Container[str] = ()) -> TrainConfig:
    """Return the settings with the GPUs divided, but for what is `given` of it.

    Half of them are the learner's, or all of them where they are shared. The others form engines that leave a third for the cache.
    """
    if hardware.gpus == 1 and not config.weights.colocate:  # as a run on one GPU does by itself
        config = changed(config, colocate=True, sleep_level=0 if config.flow.staleness else config.weights.sleep_level)
    shared, gpus = config.weights.colocate, hardware.gpus
    if "tensor_parallel_size" not in given:
        usable = hardware.gpu_bytes * config.engine.memory_share(config.weights, hardware.gpu_bytes) * 2 / 3
        widest = 1 if shared else min(max(1, gpus // 2), hardware.gpus_per_node)
        parallel = 1
        while served_bytes(config, shape) / parallel > usable and 2 * parallel <= widest:
            parallel *= 2
        config = changed(config, tensor_parallel_size=parallel)
    width = config.engine.gpus_per_engine
    engines = config.engine.num_engines if "num_engines" in given else 0
    ranks = config.learner.num_learners if "num_learners" in given else 0
    if shared:
        engines = engines or max(1, (ranks or gpus) // width)
        return changed(config, num_engines=engines, num_learners=ranks or engines * width)
    gpus -= config.training.eval_engines * width
    ranks = ranks or max(1, gpus - engines * width if engines else gpus // 2)
    return changed(config, num_engines=engines or max(1, (gpus - ranks) // width), num_learners=ranks)


def machine_bytes(config: TrainConfig, shape: ModelShape, gpus_per_node: int) -> float:
    """Return the CPU memory of the machine of the first learner rank, which has as many other ranks as fit on it.

    Only the first one reads the whole model; the others hold what is offloaded.
    """
    first = host_bytes(config, shape)
    others = min(config.learner.num_learners, gpus_per_node) - 1
    return first + others * offloaded_bytes(config, shape)


def step_seconds(plan: Plan, work: Workload) -> dict[str, Range]:
    """Return the seconds of generation and of training, and of a step, as far as the rates of both are known.

    In an asynchronous run the slower of the two decides; where both take turns on a GPU, moving their state is added.
    """
    config, shape, card = plan.config, plan.shape, plan.hardware.card
    seconds: dict[str, Range] = {}
    speed = (work.learner_tflops * 1e12,) * 2 if work.learner_tflops else learner_rate(card) if card else None
    if speed is not None:
        seconds["train"] = train_seconds(config, shape, plan.episode_tokens, speed)
    sampled = config.flow.groups_per_step * config.sampling.n_samples_per_prompt * work.answer_tokens
    rate = (work.decode_tokens_per_s,) * 2 if work.decode_tokens_per_s else None
    if rate is None and card is not None and plan.engine.cache_tokens:
        rate = decode_rate(plan.sized, shape, plan.engine, card, (work.prompt_tokens, work.answer_tokens))
    if rate is not None:
        seconds["generate"] = over(sampled / config.engine.num_engines, rate)
    if len(seconds) == 2:
        generate, train = seconds["generate"], seconds["train"]
        if config.weights.sleeps:
            seconds["turns"] = turn_seconds(config, shape)
        together = generate.longer(train) if config.flow.staleness else generate + train
        seconds["step"] = together + seconds.get("turns", Range(0.0, 0.0))
    return seconds
