"""Evaluations for people and files: one line each during a run, and ``evaluations.jsonl``."""

from __future__ import annotations

from pathlib import Path

from agentrl.algo.assessment import Assessment
from agentrl.algo.bootstrap import Estimate
from agentrl.track.jsonl import JsonLines, encode
from agentrl.track.text import number


class EvaluationLog:
    """Appends every evaluation of a run with its intervals, kinds and failures; the file is made with the first.

    Args:
        path: File to append to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int, assessment: Assessment, seconds: float) -> None:
        """Append the evaluation of the weights of `step`."""
        lines = JsonLines(self._path)
        lines.write(encode({"step": step, "seconds": seconds, **assessment.to_json()}))
        lines.close()


def evaluation_line(assessment: Assessment) -> str:
    """An evaluation in one line; names of equal figures share one."""
    names: dict[str, list[str]] = {}
    for name, estimate in assessment.overall.items():
        names.setdefault(estimate_text(estimate), []).append(name)
    figures = ", ".join(f"{' = '.join(equal)} {text}" for text, equal in names.items())
    return f"{figures or 'nothing measured'}; {assessment.tasks} tasks{failure_text(assessment)}"


def estimate_text(estimate: Estimate) -> str:
    """A mean and its interval: ``0.512 (0.471 to 0.553)``."""
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def failure_text(assessment: Assessment) -> str:
    """What is missing from an evaluation, beginning with a comma; empty if nothing is."""
    if not assessment.failed_episodes:
        return ""
    cause, _ = next(iter(assessment.causes.items()))
    tasks = f", {len(assessment.failed_tasks)} more failed" if assessment.failed_tasks else ""
    return f"{tasks}; {assessment.failed_episodes} episodes failed, most often with {cause}"
