"""Objectives of supervised and preference training: from scores of rows to losses.

Each objective is a file: its options, its function with its facts above it, its formulas and sources; an example to copy for one's own.
torch is imported when a loss is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo import facts
from agentrl.algo.facts import facts_of
from agentrl.algo.row_losses import ObjectiveFunction
from agentrl.core.errors import ConfigError

COMPUTED = "divergence"
"""Output that the output layer makes of the options of `agentrl.algo.objectives.distill`."""

OBJECTIVES: Mapping[str, ObjectiveFunction] = facts.found_in(__name__, __path__, "sft", hyphens=True)
"""The objectives by the name of their command."""


def find_objective(name: str) -> ObjectiveFunction:
    """Return the objective of a command, or a user's own as ``file.py:name``.

    Raises:
        ConfigError: If there is none, or a user's own cannot be used.
    """
    return facts.find(facts.OBJECTIVE, name, OBJECTIVES)


def check_objective(command: str, spec: str) -> None:
    """Check that a user's objective fits the rows and the model of a command.

    Raises:
        ConfigError: If it does not.
    """
    stated, usual = facts_of(facts.find(facts.OBJECTIVE, spec, {})), facts_of(OBJECTIVES[command])
    kind, remedy = (
        f"agentrl {command}",
        f'State unit="{usual.unit}" and reads="{usual.reads}" in @agentrl.objective, or use another command.',
    )
    if stated.reads != usual.reads:
        raise ConfigError("--loss", spec, f"reads {stated.reads}, and {kind} gives it {usual.reads}", remedy)
    if stated.unit == "pair" != usual.unit:
        raise ConfigError("--loss", spec, f"is a loss of pairs, and the rows of {kind} are none", remedy)
    if stated.reads == COMPUTED and not issubclass(stated.options, usual.options):
        problem = f"has options without those of the divergence, which {kind} computes by {usual.options.__name__}"
        raise ConfigError("--loss", spec, problem, f"Inherit its options from {usual.options.__module__}.{usual.options.__name__}.")
