"""Settings with which a run fits that does not fit as it is: all combinations of what may be changed are tried, the quickest is taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from agentrl.algo.teacher_specs import learner_teacher
from agentrl.config.sections import changed
from agentrl.core.settings import flag
from agentrl.learner.backends import facts_of_backend
from agentrl.resolve.sizing.plan import Plan, Workload, divide, make_plan, step_seconds
from agentrl.resolve.sizing.speed import CARDS

Values: TypeAlias = Mapping[str, Any]

LEAST_MICRO_BATCH = 4096
LEAST_BUCKET_MIB = 64
OFFLOADABLE = ("optimizer", "reference", "ema")
"""Values of ``--offload`` that are tried."""
WIDEST = 8
"""Times as many GPUs as an engine has that are tried for it."""
MOST_GPUS = 4096
ADAPTER_RANK = 16
NOMINAL = CARDS["h100"]
"""GPU whose speed compares settings where that of the GPUs is not known."""

KEPT, SHARED, ADAPTED = "", "sharing GPUs", "training an adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Settings with which a run fits."""

    plan: Plan
    values: Values  # settings that are not those of the run
    kind: str  # text for people about more than memory that they change; empty if they do not
    seconds: float  # of a step, to compare with others
    work_s: float  # of generation and training together

    @property
    def flags(self) -> str:
        """The settings as flags."""
        return " ".join(as_flag(name, value) for name, value in self.values.items())


def as_flag(name: str, value: Any) -> str:
    """Return the words that give a setting its value; a value of several words stands for itself."""
    if value is True:
        return flag(name)
    return " ".join([flag(name), *map(str, value if isinstance(value, tuple) else [value])])


def remedies(plan: Plan, work: Workload) -> list[Remedy]:
    """Return settings with which a run fits, the quickest of each kind: what is trained and where stays, GPUs are shared, or an adapter.

    The quickest comes first, but adapters, which train something else, come last. The list is empty if nothing helps.
    """
    kept, shared = _quickest(plan, work, {}, KEPT), None
    values = {} if plan.config.weights.colocate else _sharing(plan)
    if values:
        shared = _quickest(plan, work, values, SHARED)
    found = sorted((each for each in (kept, shared) if each is not None), key=lambda remedy: remedy.seconds)
    adapted = (_quickest(plan, work, adapter, ADAPTED) for adapter in _adapters(plan))
    return [*found, *itertools.islice((each for each in adapted if each is not None), 1)]


def memory_remedy(plan: Plan, work: Workload) -> Remedy | None:
    """Return the quickest settings with which a run fits whose processes, GPUs and trained weights stay; `None` if there are none."""
    return _quickest(plan, work, {}, KEPT, wider=False)


def more_gpus(plan: Plan, work: Workload) -> Remedy | None:
    """Return how a run fits on the fewest GPUs of the same kind, doubled as often as it takes; `None` if it never does."""
    hardware, gpus = plan.hardware, plan.hardware.gpus
    if not facts_of_backend(plan.config.learner.learner_backend).divides:
        return None
    while (gpus := 2 * gpus) <= MOST_GPUS:
        larger = replace(hardware, gpus=gpus)
        config = divide(changed(plan.config, zero_stage=3), plan.shape, larger)
        found = _quickest(make_plan(config, plan.shape, larger, work), work, {}, KEPT)
        if found is not None:
            engine = config.engine
            division = {"num_engines": engine.num_engines, "tensor_parallel_size": engine.tensor_parallel_size}
            return replace(found, values={**division, "num_learners": config.learner.num_learners, "zero_stage": 3, **found.values})
    return None


def _quickest(plan: Plan, work: Workload, values: Values, kind: str, *, wider: bool = True) -> Remedy | None:
    base = replace(plan, config=changed(plan.config, **values))
    fitting = []
    for combination in _combinations(base, wider=wider):
        tried = {**values, **combination}
        if (division := _engines(plan, tried)) is None:
            continue
        tried |= division
        planned = make_plan(changed(plan.config, **tried), plan.shape, plan.hardware, work)
        if not planned.problems:
            step_s, work_s = _seconds(planned, work)
            fitting.append(Remedy(plan=planned, values=tried, kind=kind, seconds=step_s, work_s=work_s))
    return min(fitting, key=_order, default=None)


def _order(remedy: Remedy) -> tuple[bool, int, float, float, int]:
    """Return the place of a remedy among others: an optimizer in CPU memory and wider engines are for when nothing else helps."""
    # Rounded, so that of settings that are as quick as each other those with the fewest changes come first.
    config, seconds = remedy.plan.config, (round(remedy.seconds, 3), round(remedy.work_s, 3))
    changes = sum(len(value) if isinstance(value, tuple) else 1 for value in remedy.values.values())
    return "optimizer" in config.learner.offload, config.engine.tensor_parallel_size, *seconds, changes


def _combinations(plan: Plan, *, wider: bool) -> Iterator[dict[str, Any]]:
    """Yield the changes to try, with few before many."""
    engine, learner, algo, weights = plan.config.engine, plan.config.learner, plan.config.algo, plan.config.weights
    widths = [engine.tensor_parallel_size * 2**times for times in range(WIDEST.bit_length())] if wider else []
    divides = facts_of_backend(learner.learner_backend).divides
    sharded = divides and not learner.load_in_4bit  # on one GPU too, where it keeps no gradients beside an optimizer in CPU memory
    options: Sequence[tuple[str, Any, Sequence[Any]]] = (
        ("tensor_parallel_size", engine.tensor_parallel_size, [width for width in widths if width <= plan.hardware.gpus_per_node]),
        ("gradient_checkpointing", learner.gradient_checkpointing, [True]),
        ("reference", "reference" in learner.offload, [True] if algo.init_kl_coef or learner_teacher(algo.teacher) else []),
        ("ema", "ema" in learner.offload, [True] if learner.ema_decay is not None else []),
        ("zero_stage", learner.zero_stage, [3] if sharded else []),
        ("micro_batch_tokens", learner.micro_batch_tokens, _fewer_tokens(learner.micro_batch_tokens)),
        ("weight_bucket_mib", weights.weight_bucket_mib, [LEAST_BUCKET_MIB] if weights.weight_bucket_mib > LEAST_BUCKET_MIB else []),
        ("optimizer", "optimizer" in learner.offload, [True] if learner.zero_stage else []),
    )
    choices = [[(name, value, now) for value in dict.fromkeys((now, *values))] for name, now, values in options]
    for combination in itertools.product(*choices):
        changes = {name: value for name, value, now in combination if value != now}
        moved = [name for name in OFFLOADABLE if changes.pop(name, False)]
        yield {**changes, **({"offload": (*learner.offload, *moved)} if moved else {})}


def _fewer_tokens(tokens: int) -> list[int]:
    return [tokens // part for part in (2, 4) if tokens // part >= LEAST_MICRO_BATCH]


def _engines(plan: Plan, values: Values) -> dict[str, int] | None:
    """Return the number of engines for which there is room where their width or their number does not go with the GPUs.

    `None` if learner ranks cannot share GPUs with engines of that width.
    """
    config = changed(plan.config, **values)
    width, ranks = config.engine.gpus_per_engine, config.learner.num_learners
    if config.weights.colocate and ranks % width:
        return None
    if config.weights.colocate:
        engines = ranks // width
    elif width == plan.config.engine.gpus_per_engine and plan.gpus <= plan.hardware.gpus:
        engines = plan.config.engine.num_engines
    else:
        engines = max(1, (plan.hardware.gpus - ranks) // width)
    return {"num_engines": engines} if engines != plan.config.engine.num_engines else {}


def _sharing(plan: Plan) -> Values:
    """Return the settings with which all GPUs are shared; none if the run cannot share them."""
    config, gpus = plan.config, min(plan.hardware.gpus, MOST_GPUS)
    alone = plan.gpus > 1 and not facts_of_backend(config.learner.learner_backend).divides
    if config.rollout.num_front_ends > 1 or gpus < plan.gpus or alone:
        return {}
    return {"colocate": True, "num_learners": plan.gpus, **({"sleep_level": 0} if config.flow.staleness else {})}


def _adapters(plan: Plan) -> Iterator[Values]:
    if not plan.config.lora.lora_rank:
        yield {"lora_rank": ADAPTER_RANK}
    if not plan.config.learner.load_in_4bit:
        rank = {} if plan.config.lora.lora_rank else {"lora_rank": ADAPTER_RANK}
        yield {**rank, "load_in_4bit": True, **({"zero_stage": 2} if plan.config.learner.zero_stage == 3 else {})}


def _seconds(plan: Plan, work: Workload) -> tuple[float, float]:
    """Return the seconds of a step, and those of generation and training one after the other, by which settings are compared."""
    hardware = plan.hardware if plan.hardware.card else replace(plan.hardware, card=NOMINAL)
    seconds = step_seconds(replace(plan, hardware=hardware), work)
    return seconds["step"].middle, seconds["generate"].middle + seconds["train"].middle
