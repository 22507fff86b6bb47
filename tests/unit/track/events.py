"""Events around made-up metrics and groups."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.core.callbacks import GroupJudged, MetricsRow, RunEnd
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task

END = RunEnd(status="finished", summary={})


def row(metrics: Mapping[str, float]) -> MetricsRow:
    return MetricsRow(step=int(metrics["step"]), metrics=metrics)


def judged(summary: GroupSummary) -> GroupJudged:
    return GroupJudged(group_id=summary.group_id, attempt=0, task=Task("q", id="t0"), verdict="kept", reason="", summary=summary)
