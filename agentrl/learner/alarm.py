"""The alarm of a run: engine and learner disagree about what the same weights make of the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.core.errors import MismatchError

CAUSES = """\
Likely causes, in order, and what to try:
  1. Dropout or noise of the model stays on while training: set its ..._dropout and ..._jitter_noise to 0 in config.json; --lora-dropout 0.
  2. The attention kernel leaves out a soft cap or a window of the model: --attn-implementation eager.
  3. Other RoPE factors: they depend on the rows of a micro-batch (--micro-batch-tokens 1) or on the context (--max-model-len).
  4. The engines have other weights: --weight-transport disk, --publish merged, --kv-on-publish recompute, or --engine transformers.
  5. The data types are too coarse: --engine-dtype float32, --learner-dtype float32; --router-replay for a mixture of experts.
An engine that is meant to sample from another distribution than the model's needs --max-mismatch none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Facts about the two sides that are compared."""

    model: str  # class of the learner's model
    learner_dtype: str
    kernel: str
    layout: str
    engine: str  # with its data type

    def __str__(self) -> str:
        """Name both sides."""
        learner = f"{self.model} in {self.learner_dtype}, attention {self.kernel}, {self.layout}"
        return f"the learner ({learner}) and the engine ({self.engine})"


class MismatchAlarm:
    """Compares engine and learner in the first step with tokens that exactly the learner's weights sampled, and ends the run.

    The first step has tokens of the weights that both sides loaded; the first later one has tokens of weights that were published. Each is
    judged once. Steps after them may drift, as rounding grows with the weights: about these the tracker warns.

    Args:
        limit: Mean absolute difference of log-probabilities, nats; `None`: nothing is judged.
        comparison: What is compared.
    """

    def __init__(self, limit: float | None, comparison: Comparison) -> None:
        self._limit, self._comparison = limit, comparison
        self._judged: set[bool] = set()

    @property
    def metrics(self) -> dict[str, float]:
        """The limit, for those who judge later steps; nothing without one."""
        return {} if self._limit is None else {"mismatch/limit": self._limit}

    def judge(self, step: int, metrics: Mapping[str, float], num_tokens: int) -> None:
        """Judge a step, by its number from 0, the metrics of all ranks, and the tokens that exactly its weights sampled.

        Raises:
            MismatchError: If engine and learner differ by more than the limit.
        """
        published = step > 0
        if self._limit is None or published in self._judged or "mismatch/mean" not in metrics:
            return
        self._judged.add(published)
        mean, highest = metrics["mismatch/mean"], metrics["mismatch/max"]
        if not mean > self._limit:  # what is no number ends the run as a gradient that is not finite
            return
        weights = f"the published weights of version {step}" if published else "the weights that both loaded"
        gap = f"{mean:.3g} nats on average and {highest:.3g} at most, and the limit is {self._limit:g} on average (--max-mismatch)"
        raise MismatchError(
            f"step {step + 1}: {self._comparison} disagree about {weights}. Their log-probabilities of {num_tokens} sampled tokens differ "
            f"by {gap}.\n{CAUSES}"
        )
