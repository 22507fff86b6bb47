"""A plan of a run before it costs anything: what fits into the memory of the GPUs, which flags help, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.model_shape import ModelShape, read_shape
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed, flag
from agentrl.core.settings import Count, NonNegative
from agentrl.profile.memory import CONTEXT, ENGINE_EXTRA, GIB, EnginePlan, engine_plan, host_bytes, learner_parts, parts_beside_engine
from agentrl.track.text import counted

LEAST_MICRO_BATCH = 4096
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Episodes of a step, and measured rates; a rate of 0 is unknown."""

    prompt_tokens: Count = 512
    """Tokens of a typical prompt."""
    answer_tokens: Count = 1024
    """Tokens that are sampled in a typical episode."""
    learner_tflops: NonNegative = 0.0
    """Measured speed of a learner rank, 1e12 floating-point operations per second. 0: the time of training is left out."""
    decode_tokens_per_s: NonNegative = 0.0
    """Measured speed of an engine with many episodes, tokens per second. 0: the time of generation is left out."""


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
        engine, ranks = self.config.engine, self.config.learner.num_learners
        return ranks if self.config.weights.colocate else ranks + engine.num_engines * engine.gpus_per_engine

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
        engine, weights = self.sized.engine, self.sized.weights
        if weights.sleeps:  # it keeps its process
            limit -= ENGINE_EXTRA
            yield from self._handing_over()
        elif weights.colocate:
            limit -= self.hardware.gpu_bytes * weights.memory_share(engine, self.hardware.gpu_bytes)
        if self.learner_bytes > limit * (1 + 1e-9):  # where both stay, the limit is these bytes, but for the rounding of their share
            yield f"{FULL} {self.learner_bytes / GIB:.1f} GiB of the {limit / GIB:.1f} that it may fill"
        if self.engine.cache_tokens < self.episode_tokens:
            yield f"an engine has {max(0.0, self.engine.cache) / GIB:.1f} GiB per GPU left for its KV cache, which holds no whole episode"
        if engine.gpus_per_engine > self.hardware.gpus_per_node:
            machine = f"a machine has {self.hardware.gpus_per_node} (--gpus-per-node)"
            yield f"an engine of {engine.gpus_per_engine} GPUs has to be on one machine, and {machine}"
        if self.gpus > self.hardware.gpus:
            yield f"engines and learner ranks need {self.gpus} GPUs, and there are {self.hardware.gpus}"

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
    parts = learner_parts(config, shape, step_tokens=groups * work.answer_tokens)
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
        episode_tokens=work.prompt_tokens + work.answer_tokens,
    )


def divide(config: TrainConfig, shape: ModelShape, hardware: Hardware) -> TrainConfig:
    """Return the settings with the GPUs divided: half for the learner, the others in engines so wide that a third is left for the cache."""
    if hardware.gpus == 1 and not config.weights.colocate:  # as a run on one GPU does by itself
        config = changed(config, colocate=True, sleep_level=0 if config.flow.staleness else config.weights.sleep_level)
    if config.weights.colocate:
        return changed(config, num_engines=hardware.gpus, num_learners=hardware.gpus)
    usable = hardware.gpu_bytes * config.weights.memory_share(config.engine, hardware.gpu_bytes) * 2 / 3
    parallel = 1
    while shape.parameters * 2 / parallel > usable and 2 * parallel <= min(max(1, hardware.gpus // 2), hardware.gpus_per_node):
        parallel *= 2
    ranks = max(1, hardware.gpus // 2)
    engines = max(1, (hardware.gpus - ranks) // parallel)
    return changed(config, num_engines=engines, tensor_parallel_size=parallel, num_learners=ranks)


def improve(plan: Plan, work: Workload) -> tuple[Plan, list[str]]:
    """Return a plan that fits, and the flags that lead to it; if nothing helps, the last plan that was tried.

    Changes that cost little speed come first. A change that saves nothing is left out.
    """
    tried, values_so_far = plan, dict[str, object]()
    for change in CHANGES:
        if not tried.problems:
            break
        if not (values := change(tried)):
            continue
        following = make_plan(changed(tried.config, **values), plan.shape, plan.hardware, work)
        if following.learner_bytes < tried.learner_bytes or following.engine.cache > tried.engine.cache:
            tried = following
            values_so_far |= values
    return tried, [flag(name) if value is True else f"{flag(name)} {value}" for name, value in values_so_far.items()]


def _wider_engines(plan: Plan) -> dict[str, object]:
    return _doubled(plan) if plan.engine.cache_tokens < plan.episode_tokens else {}


def _narrower_shares(plan: Plan) -> dict[str, object]:
    """Wider engines, of which a GPU that is shared holds less while weights are handed over."""
    return _doubled(plan) if any(problem.startswith(HANDING_OVER) for problem in plan.problems) else {}


def _doubled(plan: Plan) -> dict[str, object]:
    room = plan.hardware.gpus - (0 if plan.config.weights.colocate else plan.config.learner.num_learners)
    parallel = 2 * plan.config.engine.tensor_parallel_size
    if parallel > min(room, plan.hardware.gpus_per_node):
        return {}
    return {"tensor_parallel_size": parallel, "num_engines": max(1, room // parallel)}


def _fewer_tokens(plan: Plan) -> dict[str, object]:
    tokens = plan.config.learner.micro_batch_tokens // 2
    return {"micro_batch_tokens": tokens} if tokens >= LEAST_MICRO_BATCH and _learner_is_full(plan) else {}


def _learner_with(name: str, value: object) -> Callable[[Plan], dict[str, object]]:
    return lambda plan: {name: value} if _learner_is_full(plan) else {}


def _learner_is_full(plan: Plan) -> bool:
    return any(problem.startswith(FULL) for problem in plan.problems)


CHANGES: Sequence[Callable[[Plan], dict[str, object]]] = (
    _wider_engines,
    _wider_engines,
    _learner_with("gradient_checkpointing", True),
    _learner_with("ema_offload", True),
    _learner_with("reference_offload", True),
    _learner_with("zero_stage", 3),
    _fewer_tokens,
    _fewer_tokens,
    _narrower_shares,
    _narrower_shares,
    _narrower_shares,
    _learner_with("optimizer_offload", True),
)
"""Changes of the settings of a plan that does not fit, which return no settings where they would not help."""


def pass_flops(shape: ModelShape, length: int) -> int:
    """Return the floating-point operations of a forward pass for a token of a row of `length` tokens; a backward pass takes twice that."""
    return 2 * shape.active_parameters + 2 * shape.layers * shape.heads * shape.head_dim * length


def step_seconds(plan: Plan, work: Workload) -> dict[str, float]:
    """Return the seconds of generation and of training, and of a step, as far as the rates of both are known.

    Training takes 6 multiplications and additions per parameter that a token meets, 8 if activations are computed again, and 2 for each
    further pass of a frozen model; attention is added. In an asynchronous run the slower of the two decides.
    """
    config, shape = plan.config, plan.shape
    episodes = config.flow.groups_per_step * config.sampling.n_samples_per_prompt
    seconds: dict[str, float] = {}
    if work.learner_tflops:
        passes = (4 if config.learner.gradient_checkpointing else 3) * config.algo.ppo_epochs
        passes += 1 if config.algo.init_kl_coef else 0
        token = passes * pass_flops(shape, plan.episode_tokens)
        if config.algo.teacher and (teacher := read_shape(config.algo.teacher)) is not None:
            token += pass_flops(teacher, plan.episode_tokens)
        flops = token * plan.episode_tokens * episodes
        seconds["train"] = flops / (work.learner_tflops * 1e12 * config.learner.num_learners)
    if work.decode_tokens_per_s:
        seconds["generate"] = episodes * work.answer_tokens / (work.decode_tokens_per_s * config.engine.num_engines)
    if len(seconds) == 2:
        seconds["step"] = max(seconds.values()) if config.flow.staleness else sum(seconds.values())
    return seconds


def plan_lines(plan: Plan, work: Workload) -> list[str]:
    """Return the plan as lines of text."""
    config, shape, gpu = plan.config, plan.shape, plan.hardware.gpu_bytes
    learner, engine = config.learner, config.engine
    about = "" if shape.exact else f", taken for a decoder like Llama's since {shape.model_type or 'its type'} is not known exactly"
    active = f", {shape.active_parameters / 1e9:.2f}e9 of them per token" if shape.experts else ""
    how, switch = "sharing GPUs with" if config.weights.colocate else "and", "on" if learner.gradient_checkpointing else "off"
    lines = [
        f"{shape.model_type}: {shape.parameters / 1e9:.2f}e9 parameters{active}{about}",
        f"{counted(engine.num_engines, 'engine')} of {counted(engine.tensor_parallel_size, 'GPU')} {how} "
        f"{counted(learner.num_learners, 'learner rank')} with ZeRO-{learner.zero_stage}",
        f"micro-batches of {learner.micro_batch_tokens:,} tokens, gradient checkpointing {switch}",
        "",
        f"learner rank 0, GiB of {gpu / GIB:.0f}",
        *_rows({**plan.parts, "total": plan.learner_bytes}),
        f"  host memory          {host_bytes(config, shape) / GIB:>8.1f}",
        "",
        f"GPU of an engine, GiB of {gpu / GIB:.0f}",
        *_rows({"weights": plan.engine.weights, "graphs and buffers": plan.engine.extra, "KV cache": plan.engine.cache}),
        f"  {plan.engine.cache_tokens:,} tokens per engine: {plan.episodes:,} episodes of {plan.episode_tokens:,} tokens in all engines",
        "",
    ]
    seconds = step_seconds(plan, work)
    if seconds:
        lines += ["seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())]
    return lines + _verdict(plan, work)


def _rows(parts: Mapping[str, float]) -> list[str]:
    return [f"  {name:<20} {size / GIB:>8.1f}" for name, size in parts.items()]


def _verdict(plan: Plan, work: Workload) -> list[str]:
    if not plan.problems:
        return ["fits"]
    better, flags = improve(plan, work)
    lines = [f"does not fit: {problem}" for problem in plan.problems]
    if not better.problems:
        return [*lines, f"fits with {' '.join(flags)} ({better.learner_bytes / GIB:.1f} GiB on a learner rank)"]
    tried = f", not even {' '.join(flags)}" if flags else ""
    largest = sorted(better.parts.items(), key=lambda part: -part[1])[:2]
    where = " and ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return [*lines, f"no flags help{tried}: {'; '.join(better.problems)} ({where}, above all)", "use more GPUs, or larger ones"]
