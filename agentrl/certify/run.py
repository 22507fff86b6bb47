"""One certification from a model's configuration to its certificate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from agentrl.certify.compare import compare_adapter, compare_kernel, reference_model, reference_scores
from agentrl.certify.engines import compare_engine
from agentrl.certify.results import Certificate, Comparison, Verdict
from agentrl.certify.rows import trial_batch
from agentrl.core.model_shape import placeholder_ids
from agentrl.core.tokenizers import quiet_transformers
from agentrl.learner.attention import KERNELS
from agentrl.weights.twin import build_twin, parameters_of, twin_config
from agentrl.weights.twin_images import drawn_images
from agentrl.weights.twin_sizes import VLLM_HEAD

SEEDS = (0, 1)
"""Seeds of weights and rows. A comparison that fails with the first is made with the second: equal scores of two experts, which rounding
decides, do not come twice."""


def certify(model: str, config: Any, *, vllm: bool = False, only: Sequence[str] = ()) -> Certificate:
    """Compare learner, adapter and engines with the model on its twin.

    Args:
        model: Name of the model, for the certificate.
        config: Its configuration, or that of its text part, which is certified alone then.
        vllm: Try vLLM too.
        only: Kernels of the learner to try, and nothing else; empty for everything.

    Raises:
        ConfigError: If there is no twin of this model.
    """
    start = time.monotonic()
    twin = twin_config(config, head=VLLM_HEAD if vllm else 0)
    first, parameters, layers = _compared(twin, SEEDS[0], only, vllm=vllm)
    if any(comparison.verdict is Verdict.WRONG for comparison in first):
        second, _, _ = _compared(twin, SEEDS[1], only, vllm=vllm)
        first = [_confirmed(comparison, second) for comparison in first]
    return Certificate(
        model=model,
        model_type=str(config.model_type),
        layers=layers,
        parameters=parameters,
        comparisons=tuple(with_remedies(first, all_tried=not only)),
        seconds=time.monotonic() - start,
    )


def with_remedies(comparisons: Sequence[Comparison], *, all_tried: bool) -> list[Comparison]:
    """Return comparisons in which each wrong one of a kernel, or of an engine, names one that is exact, if there is one."""
    wrong = {(each.part, _kernel(each)) for each in comparisons if each.verdict is Verdict.WRONG and "prefix trees" not in each.name}
    exact = {(each.part, _kernel(each)): None for each in comparisons if each.verdict is Verdict.EXACT}
    flags = {"learner": "--attn-implementation", "engine": "--engine"}

    def remedy(each: Comparison) -> str:
        others = [name for part, name in exact if part == each.part and (part, name) not in wrong]
        if each.remedy or each.part not in flags:
            return each.remedy
        if others:
            return f"Use {flags[each.part]} {others[0]}, which is exact."
        return "None of those that were tried is exact." if all_tried else "`agentrl certify` with this model tries the other kernels."

    return [replace(each, remedy=remedy(each)) if each.verdict is Verdict.WRONG else each for each in comparisons]


def _kernel(comparison: Comparison) -> str:
    return comparison.name.partition(",")[0]


def _compared(twin: Any, seed: int, only: Sequence[str], *, vllm: bool) -> tuple[list[Comparison], int, int]:
    model = build_twin(twin, seed=seed)
    with tempfile.TemporaryDirectory(prefix="agentrl-certify-") as folder, quiet_transformers():
        model.save_pretrained(folder)
        return list(_comparisons(folder, seed, only, vllm=vllm)), parameters_of(model), int(twin.get_text_config().num_hidden_layers)


def _comparisons(folder: str, seed: int, only: Sequence[str], *, vllm: bool) -> Iterator[Comparison]:
    reference = reference_model(folder)
    batch = trial_batch(seed, drawn_images(reference) if placeholder_ids(reference.config) else ())
    expected = reference_scores(reference, batch)
    for kernel in only or KERNELS:
        yield from compare_kernel(folder, kernel, batch, expected)
    if only:
        return
    yield compare_adapter(folder, batch)
    yield compare_engine(folder, batch, reference)
    if vllm:
        yield compare_engine(folder, batch, reference, vllm=True)


def _confirmed(comparison: Comparison, others: Sequence[Comparison]) -> Comparison:
    """Return a comparison that failed as it came out with other weights, if those say that it is exact."""
    if comparison.verdict is not Verdict.WRONG:
        return comparison
    found = next((each for each in others if (each.part, each.name) == (comparison.part, comparison.name)), comparison)
    return replace(found, reason="exact with the second of two seeds") if found.verdict is Verdict.EXACT else comparison
