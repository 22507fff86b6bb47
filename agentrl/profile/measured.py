"""A plan beside a run that was made with it: memory that was taken, seconds that passed, and the rates that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.profile.recorded import paced
from agentrl.resolve.sizing.memory import CONTEXT, GIB
from agentrl.resolve.sizing.plan import Plan, Workload, step_seconds
from agentrl.resolve.sizing.speed import Range, step_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's own figures, means over its steady steps; 0 for one that it did not record."""

    steps: int
    prompt_tokens: float  # of an episode, with everything that it did not sample
    answer_tokens: float  # sampled
    episodes: float  # trained on in a step
    peak_bytes: float  # most that tensors of a learner rank took on its GPU
    kv_tokens: float  # that the cache of an engine holds
    train_s: float
    generate_s: float  # in which engines had something to do
    step_s: float

    def workload(self) -> dict[str, int]:
        """Return the lengths of the run's episodes, as fields of `Workload`."""
        return {"prompt_tokens": max(1, round(self.prompt_tokens)), "answer_tokens": max(1, round(self.answer_tokens))}


def read_measured(metrics: Sequence[Mapping[str, Any]], *, max_staleness: int) -> Measured:
    """Read the rows of ``metrics.jsonl``.

    Raises:
        ConfigError: If no step tells of the run's pace.
    """
    rows = paced(metrics, max_staleness)
    if not rows:
        raise ConfigError("--measured", f"{len(metrics)} steps", "no step tells of the run's pace", "Let the run take more steps.")

    def mean(name: str) -> float:
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        return statistics.fmean(values) if values else 0.0

    answers, trained = mean("episode/tokens_mean"), mean("episodes")
    # Rows hold prompts and observations as well, so what was not sampled is the rest.
    whole = mean("tokens/rows") / trained if trained else answers
    step_s = mean("time/step_s")
    return Measured(
        steps=len(rows),
        prompt_tokens=max(0.0, whole - answers),
        answer_tokens=answers,
        episodes=trained,
        peak_bytes=max((float(row.get("memory/peak_gib") or 0.0) for row in rows), default=0.0) * GIB,
        kv_tokens=mean("engine/kv_tokens"),
        train_s=mean("time/train_s"),
        generate_s=(1.0 - mean("idle/generator")) * step_s,
        step_s=step_s,
    )


def compared_lines(measured: Measured, plan: Plan, work: Workload) -> Iterator[str]:
    """Yield lines with what was measured, what `plan` says, and how far it is off; then the rates that the run shows."""
    yield f"measured in {measured.steps} steps   measured    planned   the plan is"
    for name, was, planned, form in _memory(measured, plan):
        yield f"  {name:<26}{was:>10{form}} {planned:>10{form}}   {_off(was, Range(planned, planned))}"
    seconds = step_seconds(plan, work)
    for name, was in (("train", measured.train_s), ("generate", measured.generate_s), ("step", measured.step_s)):
        if was and name in seconds:
            yield f"  {name + ', s':<26}{was:>10.3g} {seconds[name]!s:>10}   {_off(was, seconds[name])}"
    yield from _rates(measured, plan)


def _memory(measured: Measured, plan: Plan) -> Iterator[tuple[str, float, float, str]]:
    """Yield name, measured and planned value, and the form of both; the allocator does not count what belongs to the process."""
    if measured.peak_bytes:
        yield "peak of a learner rank, GiB", measured.peak_bytes / GIB, (plan.learner_bytes - CONTEXT) / GIB, ".1f"
    if measured.kv_tokens:
        yield "KV cache, tokens", measured.kv_tokens, float(plan.engine.cache_tokens), ",.0f"


def _off(was: float, planned: Range) -> str:
    # A plan of one value, not a range, is right up to rounding, which the last line decides.
    if planned.low <= was <= planned.high and planned.low < planned.high:
        return "right"
    end = planned.low if was < planned.low else planned.high
    share = round(100 * (end / was - 1))
    return "right" if not share else f"{abs(share)} % too {'high' if share > 0 else 'low'}"


def _rates(measured: Measured, plan: Plan) -> Iterator[str]:
    config = plan.config
    tflops = tokens = 0.0
    if measured.train_s:
        tflops = step_flops(config, plan.shape, plan.episode_tokens) / measured.train_s / config.learner.num_learners / 1e12
    if measured.generate_s:
        tokens = measured.episodes * measured.answer_tokens / measured.generate_s / config.engine.num_engines
    if tflops and tokens:
        yield f"rates of this run: --learner-tflops {tflops:.3g} --decode-tokens-per-s {tokens:.0f}"
