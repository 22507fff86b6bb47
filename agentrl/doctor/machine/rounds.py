"""Two steps of a run on the bundled model: an engine samples, the learner scores and trains, publishes, moves away and comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import torch

from agentrl.cluster.build import build_engine, build_learner_rank, worker_environment
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.disk import size_text
from agentrl.core.errors import AgentRLError, MismatchError, WeightsDifferError
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, Group, IntArray, Sampling, Status, Task, Trajectory, Turn, ints
from agentrl.doctor.machine.findings import Finding, Level, judged
from agentrl.resolve.parts import cluster_plan, mismatch_limit

PART = "training"
TEXTS = ("What is 3 + 4?", "Name a colour.", "Repeat: one two three four five six seven.", "Yes or no?")
MEMBERS, TOKENS, CONTEXT = 2, 16, 256
SAME = {"cpu": 1e-4, "cuda": 0.1}
"""Difference of log-probabilities of the same tokens before and after an engine slept that passes for rounding, nats."""
GPU_SHARE = 0.3
"""Share of a GPU's memory that vLLM gets here, which leaves room for others."""


def settings(engine: Literal["transformers", "vllm"], device: torch.device) -> TrainConfig:
    """Return the settings of the two steps; weights go by files, which one GPU allows to every engine."""
    gpu = {"colocate": True, "weight_transport": "shm", "gpu_memory_utilization": GPU_SHARE} if device.type == "cuda" else {}
    small = {"max_model_len": CONTEXT, "max_num_seqs": 8, "kv_cache_gib": 0.05, "max_new_tokens": TOKENS, "num_steps": 2}
    eager = {"engine_args": ("enforce_eager",)} if engine == "vllm" else {}
    return changed(TrainConfig(), engine=engine, device=device.type, **eager, **small, **gpu)


async def rounds(engine: Literal["transformers", "vllm"], device: torch.device) -> AsyncIterator[Finding]:
    """Try everything that a run does with an engine and the learner; the learner's own moves only beside the engine of transformers."""
    config = settings(engine, device)
    plan = cluster_plan(config, "cuda" if device.type == "cuda" else "cpu")
    os.environ.update(worker_environment(plan.engine))
    learner, samples = build_learner_rank(plan), build_engine(plan.engine)
    prompts, limit = _prompts(plan.engine.model.model), mismatch_limit(config, plan.device) or 0.0
    try:
        learner.start(0, 1, 0)
        await samples.start()
        groups = await sampled(samples, prompts, 0)
        yield _step(f"{engine} against the learner", learner, 0, groups, limit)
        yield await _published(f"{engine} after a publication", learner, samples, prompts, limit)
        if engine == "transformers":
            yield moved(learner, device)
        yield await slept(engine, samples, prompts, device)
    finally:
        await samples.close()
        learner.close()


def _prompts(model: str) -> list[IntArray]:
    tokenizer = load_tokenizer(model)
    return [ints(tokenizer(text)["input_ids"]) for text in TEXTS]


async def sampled(engine: Engine, prompts: Sequence[IntArray], version: int) -> list[Group]:
    """Return groups of answers, sampled all at once, of which one in two is rewarded."""
    asked = [(number, member) for number in range(len(prompts)) for member in range(MEMBERS)]
    requests = [
        GenerationRequest(
            request_id=f"{version}-{number}-{member}",
            prompt_ids=prompts[number],
            sampling=Sampling(max_tokens=TOKENS, seed=1000 * version + MEMBERS * number + member),
        )
        for number, member in asked
    ]
    answers = dict(zip(asked, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    return [
        Group(
            group_id=n, task=Task(""), trajectories=tuple(_episode(prompts[n], answers[n, m], f"{n}-{m}", float(m)) for m in range(MEMBERS))
        )
        for n in range(len(prompts))
    ]


def _episode(prompt: IntArray, answer: Generation, name: str, reward: float) -> Trajectory:
    turn = Turn(
        prompt_ids=prompt,
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        versions=answer.versions,
        finish_reason=answer.finish_reason,
        reward=reward,
    )
    group = int(name.partition("-")[0])
    return Trajectory(trajectory_id=name, episode_id=name, group_id=group, turns=(turn,), status=Status.FINISHED, reward=reward)


def _step(name: str, learner: Any, step: int, groups: Sequence[Group], limit: float) -> Finding:
    """Train a step, which compares the learner's log-probabilities with the engine's."""
    remedy = "Compare the parts with `agentrl certify --vllm`; --engine transformers, and --attn-implementation eager compute it plainly."
    try:
        metrics = learner.train(step, *groups).metrics
    except MismatchError as error:
        return Finding(part=PART, name=name, level=Level.WRONG, found=str(error).splitlines()[0], remedy=remedy)
    mean = metrics.get("mismatch/mean", float("nan"))
    found = f"differ by {mean:.1e} nats on average, limit {limit:g}; gradient {metrics.get('grad_norm', float('nan')):.3g}"
    # Written so that a mean that is not a number counts as wrong.
    return judged(PART, name, found, wrong=not mean <= limit, remedy=remedy)


async def _published(name: str, learner: Any, engine: Engine, prompts: Sequence[IntArray], limit: float) -> Finding:
    """Publish the learner's weights, which are compared by digest, and compare what the engine samples then."""
    try:
        await engine.load_weights(learner.export_weights(1))
    except WeightsDifferError as error:
        return Finding(part=PART, name=name, level=Level.WRONG, found=str(error), remedy="Train with --engine transformers.")
    return _step(name, learner, 1, await sampled(engine, prompts, 1), limit)


def moved(learner: Any, device: torch.device) -> Finding:
    """Move weights, master weights and optimizer out of the device's memory and back, and compare them by digest."""
    before, held = learner.digests(), _held(device)
    learner.offload(keep_weights=False)
    left = _held(device)
    learner.reload()
    same = before == learner.digests()
    found = f"{len(before)} tensors {'equal' if same else 'differ'} by digest"
    found += f"; {size_text(held)} of the GPU became {size_text(left)}" if device.type == "cuda" else ""
    kept = device.type == "cuda" and left >= held
    remedy = (
        "Train without turns: --sleep-level 0, or engines and learner on GPUs of their own; please report versions of torch and DeepSpeed."
    )
    return judged(PART, "learner offloaded and back", found, wrong=not same, warning=kept, remedy=remedy)


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


async def slept(name: str, engine: Any, prompts: Sequence[IntArray], device: torch.device) -> Finding:
    """Let an engine sleep and wake, and sample the same again."""
    title, remedy = f"{name} asleep and awake", "Train with --sleep-level 0, or engines and learner on GPUs of their own."
    if name == "vllm" and device.type == "cpu":
        return Finding(part=PART, name=title, level=Level.UNTRIED, found="vLLM sleeps on GPUs only")
    before, free = await sampled(engine, prompts, 2), _free(device)
    try:
        await engine.sleep(1)
        asleep = _free(device)
        await engine.wake("weights", "kv_cache")
        after = await sampled(engine, prompts, 2)
    except AgentRLError as error:
        return Finding(part=PART, name=title, level=Level.WRONG, found=str(error), remedy=remedy)
    worst = gap(before, after)
    found = f"the same answers, off by {worst:.1e} nats" if worst < float("inf") else "other answers"
    found += f"; {size_text(max(0, asleep - free))} of the GPU were free meanwhile" if device.type == "cuda" else ""
    kept = device.type == "cuda" and name == "vllm" and asleep <= free
    return judged(PART, title, found, wrong=not worst <= SAME[device.type], warning=kept, remedy=remedy)


def _free(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def gap(before: Sequence[Group], after: Sequence[Group]) -> float:
    """Return the largest difference of log-probabilities of the tokens that answers begin with in common; infinite if most have none.

    On a GPU rounding depends on what else is in a batch, so that with the same seed an answer may part at some token.
    """
    worst, common = 0.0, list[bool]()
    for one, other in zip(before, after, strict=True):
        for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
            (left,), (right,) = mine.turns, theirs.turns
            same = 0
            while same < min(map(len, (left.token_ids, right.token_ids))) and left.token_ids[same] == right.token_ids[same]:
                same += 1
            worst = max([worst, *abs(left.logprobs[:same] - right.logprobs[:same]).tolist()])
            common.append(same > 0)
    return worst if 2 * sum(common) > len(common) else float("inf")
