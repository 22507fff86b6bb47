"""Supervised fine-tuning: the likelihood of given answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.algo.facts import objective
from agentrl.algo.row_losses import RowLosses, RowScores


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Options of `sft`."""

    loss: Literal["nll", "dft"] = "nll"
    """``nll``: negative log-likelihood; ``dft``: each token's weighted by its probability (dynamic fine-tuning, arXiv:2508.05629).
    Or a function of your own, ``file.py:name``."""


@objective(unit="place", options=SftOptions, figures=("token_accuracy", "entropy"))
def sft(scores: RowScores, options: SftOptions) -> RowLosses:
    """``-log p`` of each trained token; ``dft`` multiplies it by p, which has no gradient (arXiv:2508.05629)."""
    losses = -scores.outputs
    if options.loss == "dft":
        losses = losses * scores.outputs.detach().exp()
    return RowLosses(losses=losses, metrics=scores.figures)
