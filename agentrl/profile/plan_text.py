"""The text of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentrl.resolve.sizing.memory import GIB
from agentrl.resolve.sizing.plan import Plan, Workload, step_seconds
from agentrl.resolve.sizing.search import KEPT, Remedy, more_gpus, remedies
from agentrl.resolve.sizing.speed import Range
from agentrl.track.text import counted


def plan_lines(plan: Plan, work: Workload) -> list[str]:
    """Return the plan as lines of text."""
    config, shape, gpu = plan.config, plan.shape, plan.hardware.gpu_bytes
    learner, engine = config.learner, config.engine
    about = "" if shape.exact else f", taken for a decoder like Llama's since {shape.model_type or 'its type'} is not known exactly"
    active = f", {shape.active_parameters / 1e9:.2f}e9 of them per token" if shape.experts else ""
    how, switch = "sharing GPUs with" if config.weights.colocate else "and", "on" if learner.gradient_checkpointing else "off"
    lines = [
        f"{shape.model_type}: {shape.parameters / 1e9:.2f}e9 parameters{active}{about}",
        f"{counted(engine.num_engines, 'engine')} of {counted(engine.gpus_per_engine, 'GPU')} {how} "
        f"{counted(learner.num_learners, 'learner rank')} with ZeRO-{learner.zero_stage}"
        + (f", and {counted(config.training.eval_engines, 'engine')} for evaluations" if config.training.eval_engines else ""),
        f"micro-batches of {learner.micro_batch_tokens:,} tokens, gradient checkpointing {switch}",
        "",
        f"learner rank 0, GiB of {gpu / GIB:.0f}",
        *_rows({**plan.parts, "total": plan.learner_bytes}),
        f"  CPU memory           {plan.host_bytes / GIB:>8.1f}",
        "",
        f"GPU of an engine, GiB of {gpu / GIB:.0f}",
        *_rows({"weights": plan.engine.weights, "graphs and buffers": plan.engine.extra, "KV cache": plan.engine.cache}),
        f"  {plan.engine.cache_tokens:,} tokens per engine: {plan.episodes:,} episodes of {plan.episode_tokens:,} tokens in all engines",
        "",
    ]
    if seconds := step_seconds(plan, work):
        lines += [f"seconds: {seconds_text(seconds)}"]
    return lines + list(_verdict(plan, work))


def seconds_text(seconds: Mapping[str, Range]) -> str:
    """Return the seconds of phases on one line."""
    return ", ".join(f"{name} {value}" for name, value in seconds.items())


def remedy_text(remedy: Remedy) -> str:
    """Return the flags of a remedy and what a learner rank needs with them."""
    kind = "" if remedy.kind == KEPT else f", {remedy.kind}"
    return f"{remedy.flags}{kind} ({remedy.plan.learner_bytes / GIB:.1f} GiB on a learner rank)"


def _rows(parts: Mapping[str, float]) -> list[str]:
    return [f"  {name:<20} {size / GIB:>8.1f}" for name, size in parts.items()]


def _verdict(plan: Plan, work: Workload) -> Iterator[str]:
    if not plan.problems:
        yield "fits"
        return
    yield from (f"does not fit: {problem}" for problem in plan.problems)
    found = remedies(plan, work)
    yield from (f"fits with {remedy_text(remedy)}" for remedy in found)
    if any(remedy.kind == KEPT for remedy in found):
        return
    if (larger := more_gpus(plan, work)) is not None:
        yield f"fits on {larger.plan.hardware.gpus} GPUs with {remedy_text(larger)}"
    elif not found:
        yield "no flags help, and no more GPUs of this size do: use larger ones"
