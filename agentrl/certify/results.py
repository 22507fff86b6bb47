"""Verdicts of a certification, and the report that they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """Outcome of one comparison."""

    EXACT = "exact"
    """Equal up to rounding."""
    WRONG = "wrong"
    """Different: training with it would learn from other numbers than the model's."""
    UNTRIED = "cannot be tried"
    """Not possible: there is no such kernel here, or the learner or the engine refuses the model by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One part of the system compared with the model, or two passes of it with each other."""

    part: str  # learner, adapter, engine or template
    name: str  # kernel and layout, name of the engine, or dialogue
    verdict: Verdict
    logprob: float | None = None  # largest difference of a log-probability, nats
    gradient: float | None = None  # largest difference of a parameter's gradient, as a share of its length
    reason: str = ""  # of a verdict that is not `EXACT`
    remedy: str = ""  # of one that is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Everything that was found about a model."""

    model: str  # as it was named
    model_type: str  # as transformers names it
    layers: int  # of the twin
    parameters: int  # of the twin
    comparisons: tuple[Comparison, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Verdict on the whole: wrong if one comparison is, exact if the learner could be tried at all."""
        verdicts = {comparison.verdict for comparison in self.comparisons if comparison.part == "learner"}
        if any(comparison.verdict is Verdict.WRONG for comparison in self.comparisons):
            return Verdict.WRONG
        return Verdict.EXACT if Verdict.EXACT in verdicts else Verdict.UNTRIED

    @property
    def exit_code(self) -> int:
        """0 for exact, 1 for wrong, 2 if nothing of the learner could be tried."""
        return {Verdict.EXACT: 0, Verdict.WRONG: 1, Verdict.UNTRIED: 2}[self.verdict]

    @property
    def wrong(self) -> Sequence[Comparison]:
        """Comparisons that failed."""
        return [comparison for comparison in self.comparisons if comparison.verdict is Verdict.WRONG]

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate in JSON's own types."""
        return {**asdict(self), "verdict": str(self.verdict), "comparisons": [asdict(each) for each in self.comparisons]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Certificate:
        """Return the inverse of `to_dict`."""
        comparisons = tuple(Comparison(**{**each, "verdict": Verdict(each["verdict"])}) for each in value["comparisons"])
        return cls(**{name: part for name, part in value.items() if name not in ("verdict", "comparisons")}, comparisons=comparisons)
