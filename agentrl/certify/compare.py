"""The learner's passes over a twin, in each of its layouts, against passes of the model itself over one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.algo.plan import AlgoConfig
from agentrl.certify.results import Comparison, Verdict
from agentrl.core.errors import ConfigError
from agentrl.core.images import PlacedImage
from agentrl.core.language_models import language_model
from agentrl.core.model_shape import placeholder_ids
from agentrl.core.tokenizers import quiet_transformers
from agentrl.learner.attention import MODULES
from agentrl.learner.batch import Batch
from agentrl.learner.head import token_scores, without_tokens
from agentrl.learner.kernels import MODEL_FAULTS, fit_kernel
from agentrl.learner.layout import Layout, MicroBatch
from agentrl.learner.lora import ADAPTER, adapted_layers, merged_parameters
from agentrl.learner.models import PolicyModel, check_output, load_model
from agentrl.learner.plan import LearnerConfig, LoraConfig
from agentrl.learner.probes import PROBE_WIDTH
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.trees import one_row_bundles, share_prefixes
from agentrl.weights.twin_images import own_arguments

LOGPROB = 2e-4
"""Difference of log-probabilities, in nats, that passes for rounding in float32; measured are 1e-6 to 2e-5."""
GRADIENT = 1e-3
"""Difference of a parameter's gradient, as a share of its length, that passes for rounding."""
SMALL = 1e-3
"""Share of the whole gradient below which the length of a parameter's gradient says nothing."""
RANK = 4
CPU = torch.device("cpu")
FAULTS = (*MODEL_FAULTS, KeyError, ImportError)
"""Errors with which a model, its adapter or an engine says that it cannot do something."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the action tokens of a batch # [A], and the gradient of their weighted sum by parameter."""

    logprobs: Tensor
    gradients: dict[str, Tensor]


def reference_model(twin: str) -> Any:
    """Return the model of a directory as transformers loads it, for passes with its own attention and without dropout."""
    with quiet_transformers():
        return language_model(twin).from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()


def reference_scores(model: Any, batch: Batch, *, gradients: bool = True) -> Scores:
    """Score a batch one row at a time, by the model's own logits."""
    model.zero_grad()
    parts = []
    bounds = [0, *torch.as_tensor(batch.row_actions).cumsum(0).tolist()]
    weights = _weights(bounds[-1])
    for row, begin, end in zip(batch.rows, bounds, bounds[1:], strict=False):
        with torch.set_grad_enabled(gradients):
            logprobs = row_scores(model, row.tokens.tolist(), torch.tensor(row.action_positions.tolist()), row.images)
            if gradients:
                # Row by row, so that the graph of only one row is in memory.
                torch.autograd.backward((logprobs * weights[begin:end]).sum())
        parts.append(logprobs.detach())
    return Scores(torch.cat(parts), _gradients(model) if gradients else {})


def row_scores(model: Any, tokens: list[int], places: Tensor, images: Sequence[PlacedImage] = ()) -> Tensor:
    """Return the log-probabilities of the tokens of a row at some places, by the model's own logits. # [a]."""
    ids = torch.tensor(tokens)[None]
    logits = model(input_ids=ids, use_cache=False, **own_arguments(model.config, ids, images)).logits[0, places - 1]
    logits = without_tokens(logits, placeholder_ids(model.config))
    return token_scores(logits, ids[0, places], torch.ones(len(places)), False)[0]


def learner_scores(policy: PolicyModel, micros: Sequence[MicroBatch], count: int) -> Scores:
    """Score a batch of `count` action tokens as the learner does, in training mode."""
    policy.zero_grad()
    logprobs, weights = torch.zeros(count), _weights(count)
    for micro in micros:
        new, _, _ = policy(micro)
        torch.autograd.backward((new * weights[micro.actions]).sum())
        logprobs[micro.actions] = new.detach()
    return Scores(logprobs, _gradients(policy.model))


def _weights(count: int) -> Tensor:
    # Random weights, because errors of gradients may cancel in a plain sum.
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def difference(scores: Scores, expected: Scores) -> tuple[float, float]:
    """Return the largest difference of a log-probability, and of a parameter's gradient as a share of its length."""
    logprob = float((scores.logprobs - expected.logprobs).abs().max())
    whole = sum(float(part.norm()) ** 2 for part in expected.gradients.values()) ** 0.5
    shares, none = [0.0], torch.zeros(())
    for name in scores.gradients.keys() | expected.gradients.keys():
        one, other = scores.gradients.get(name, none), expected.gradients.get(name, none)
        length = max(float(other.norm()), SMALL * whole)
        shares.append(float((one - other).norm()) / length if length else 0.0)
    return logprob, float(torch.tensor(shares).max())  # NaN is the largest, unlike with Python's own function


def judged(part: str, name: str, scores: Scores, expected: Scores, *, remedy: str = "") -> Comparison:
    """Compare two scores of the same batch."""
    logprob, gradient = difference(scores, expected)
    if logprob <= LOGPROB and gradient <= GRADIENT:  # also False for NaN
        return Comparison(part=part, name=name, verdict=Verdict.EXACT, logprob=logprob, gradient=gradient)
    reason = "log-probabilities differ" if not logprob <= LOGPROB else "gradients differ"
    return Comparison(part=part, name=name, verdict=Verdict.WRONG, logprob=logprob, gradient=gradient, reason=reason, remedy=remedy)


def untried(part: str, name: str, error: Exception | str) -> Comparison:
    """Return the verdict on what cannot be tried, with its reason."""
    if isinstance(error, ConfigError):
        reason = str(error.problem)
    elif isinstance(error, Exception):
        cause = error.__cause__ or error  # an engine that does not start names its own directory first
        reason = f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}"
    else:
        reason = error
    return Comparison(part=part, name=name, verdict=Verdict.UNTRIED, reason=reason)


class Learned:
    """A twin as a learner on one rank loads it, with the kernel that a run would end up with; `shares` if its rows may share prompts."""

    def __init__(self, twin: str, kernel: str, lora: LoraConfig | None = None) -> None:
        config = LearnerConfig(attn_implementation=kernel, train_vision=True)  # type: ignore[arg-type]
        self.settings = LearnerSettings(
            model=twin, learner=config, algo=AlgoConfig(), lora=lora or LoraConfig(), num_steps=1, max_new_tokens=16, device="cpu"
        )
        model = load_model(self.settings, trained=True)
        self.policy = PolicyModel(model).train()
        check_output(self.policy, self.policy, CPU)
        self.kernel, self.shares = fit_kernel(self.settings, self._engine(), [self.policy], share=True)

    def _engine(self) -> Any:
        """Return the policy in the form in which the learner tries its kernels: called, on a device."""
        engine: Any = lambda micro: self.policy(micro)  # noqa: E731 - a function takes the attribute below
        engine.ranks, engine.module = SimpleNamespace(device=CPU), self.policy
        return engine

    def layouts(self, batch: Batch) -> Iterator[tuple[str, list[MicroBatch]]]:
        """Yield the names of layouts with the batch in them, as few micro-batches as it takes."""
        layout, packed = Layout(batch), self.kernel.packed
        yield "packed" if packed else "padded", [layout.micro_batch(one_row_bundles(batch), packed=packed)]
        if self.shares:
            bundles = share_prefixes(batch, budget=batch.num_tokens, hidden_size=PROBE_WIDTH, costs=self.kernel.costs)
            yield "prefix trees", [layout.micro_batch(bundles, packed=packed)]


def compare_kernel(twin: str, kernel: str, batch: Batch, expected: Scores) -> list[Comparison]:
    """Compare every layout of a kernel with the model, and two passes in training mode with each other bit for bit."""
    if kernel in MODULES:
        return [untried("learner", kernel, "it needs a GPU")]
    try:
        learned = Learned(twin, kernel)
    except FAULTS as error:
        return [untried("learner", kernel, error)]
    found: list[Comparison] = []
    for name, micros in learned.layouts(batch):
        try:
            scores = learner_scores(learned.policy, micros, batch.num_actions)
            again = learner_scores(learned.policy, micros, batch.num_actions)
        except FAULTS as error:
            found.append(untried("learner", f"{kernel}, {name}", error))
            continue
        remedy = "Use --no-share-prompts." if name == "prefix trees" else ""
        found.append(judged("learner", f"{kernel}, {name}", scores, expected, remedy=remedy))
        # After a failure the second pass is told of only if it differs, because noise may then be the cause.
        if not found[-1].reason or not _same(scores, again):
            found.append(_twice(f"{kernel}, {name}, twice", scores, again))
    return found


def _same(scores: Scores, again: Scores) -> bool:
    same = scores.gradients.keys() == again.gradients.keys() and torch.equal(scores.logprobs, again.logprobs)
    return same and all(torch.equal(part, again.gradients[name]) for name, part in scores.gradients.items())


def _twice(name: str, scores: Scores, again: Scores) -> Comparison:
    logprob, gradient = difference(again, scores)
    if _same(scores, again):
        return Comparison(part="learner", name=name, verdict=Verdict.EXACT, logprob=0.0, gradient=0.0)
    reason = "two passes of the same rows differ: something random, such as dropout, is on"
    remedy = "Set the model's dropout and noise to 0 in its config.json."
    return Comparison(part="learner", name=name, verdict=Verdict.WRONG, logprob=logprob, gradient=gradient, reason=reason, remedy=remedy)


def compare_adapter(twin: str, batch: Batch) -> Comparison:
    """Compare a twin with a random adapter beside its layers with one into which that adapter is merged."""
    name = "LoRA and its merge"
    try:
        learned = Learned(twin, "eager", LoraConfig(lora_rank=RANK))
        # The matrix B of a new adapter is zero, so that it would change nothing.
        generator = torch.Generator().manual_seed(2)
        for layer in adapted_layers(learned.policy.model).values():
            torch.nn.init.normal_(layer.lora_B[ADAPTER].weight, std=0.05, generator=generator)
        ((_, micros), *_) = learned.layouts(batch)
        scores = learner_scores(learned.policy, micros, batch.num_actions)
        merged = reference_model(twin)
        merged.load_state_dict({key: tensor.detach().clone() for key, tensor in merged_parameters(learned.policy.model)}, strict=False)
        expected = reference_scores(merged, batch, gradients=False)
    except FAULTS as error:
        return untried("adapter", name, error)
    idle = [key for key, part in learned.policy.model.named_parameters() if part.requires_grad and part.grad is None]
    found = judged("adapter", name, Scores(scores.logprobs, {}), expected, remedy="Train the whole model: leave out --lora-rank.")
    found = replace(found, gradient=None)  # none was compared: the merged model has other parameters
    experts = [key for key, part in learned.policy.model.named_parameters() if part.dim() == 3 and ".experts." in key]
    note = "the experts have no adapter" if experts else f"{len(idle)} parts of the adapter have no gradient" if idle else ""
    if found.verdict is Verdict.EXACT and note:
        return replace(found, reason=note)
    return found
