"""Check for labels that stand at the same place of the prompt in every task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

from agentrl.check.context import Context
from agentrl.check.findings import Rule, Severity
from agentrl.check.play import CheckedEpisode
from agentrl.check.policies import label_text

MIN_TASKS, MIN_LABELS = 4, 3
SOLVED = 0.5
IDLE = ("empty", "random text")
"""Players who do nothing that would earn them the answer."""

TOKEN = re.compile(r"\w+|[^\w\s]")

RULES = (
    Rule(
        id="label-leaks",
        severity=Severity.WARNING,
        title="the answer stands at the same place of every text that the model reads",
        why="Copying it is the first thing that training finds, and often the last.",
        remedy="Keep the label out of prompts and observations; if copying is what the task teaches, all is well.",
        snippet='return StepResult(0.0, "Wrong, try again.")  # not: f"Wrong, it was {state.label}."',
    ),
)


def check_leaks(context: Context) -> None:
    """Compare what was read before the last turn with the labels."""
    right = [played.score for played in context.good() if played.policy in ("label", "solve")]
    if not right or fmean(right) < SOLVED or context.report.has("copy-solves", "constant-solves", "reward-constant"):
        return
    idle = list({played.task.id: played for played in context.good() if played.policy in IDLE}.values())
    labelled = [played for played in idle if isinstance(played.task.label, str | int | float) and label_text(played.task.label).strip()]
    if len(labelled) < MIN_TASKS or len({label_text(played.task.label) for played in labelled}) < MIN_LABELS:
        return
    for method, texts in (("reset", [played.first for played in labelled]), ("step", list(map(_answers, labelled)))):
        places = [set(_places(text, label_text(played.task.label).strip())) for text, played in zip(texts, labelled, strict=True)]
        if common := set.intersection(*places):
            seen = (
                f"in each of {len(labelled)} tasks the label is {min(common, key=len)}, as {labelled[0].task.label!r} in {texts[0][-80:]!r}"
            )
            context.found("label-leaks", method, seen)
            return


def _answers(played: CheckedEpisode) -> str:
    """Return the texts read by a player that earned no reward."""
    return "\n".join(turn.text for turn in (played.turns[:-1] if played.over else played.turns))


def _places(text: str, label: str) -> Iterator[str]:
    """Yield descriptions of the label's positions that fit other tasks too."""
    for found in re.finditer(rf"(?<!\w){re.escape(label)}(?!\w)", text):
        before, after = TOKEN.findall(text[: found.start()]), TOKEN.findall(text[found.end() :])
        yield f"word {len(before) + 1}"
        yield f"followed by {len(after)} words"
        if before and before.count(before[-1]) + after.count(before[-1]) == 1:
            yield f"what follows {before[-1]!r}"
