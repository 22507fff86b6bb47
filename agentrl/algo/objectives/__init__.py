"""Objectives of supervised and preference training: from scores of rows to losses.

Each objective is a file: its options, its function with its facts above it, its formulas and sources; an example to copy for one's own.
torch is imported when a loss is computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo import facts
from agentrl.algo.row_losses import ObjectiveFunction

OBJECTIVES: Mapping[str, ObjectiveFunction] = facts.found_in(__name__, __path__, "sft", hyphens=True)
"""The objectives by the name of their command."""
