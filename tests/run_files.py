"""Directories of runs that no training made, in the format of those that one made: small ones to test readers with, and large ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.cluster.plan import RunConfig
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.annotations import FIGURES, Annotation
from agentrl.core.callbacks import GroupJudged, MetricsRow, RunBegin, StepEnd
from agentrl.core.recording import RecordBudget
from agentrl.core.summaries import summarize
from agentrl.core.types import FinishReason, Group, GroupRequest, Span, Status, Task, Trajectory, Turn, floats, ints
from agentrl.flow.plan import TrainingConfig
from agentrl.rollout.records import group_records
from agentrl.track.plan import RecordConfig
from agentrl.track.recorders import GroupRecorder, LaunchRecorder, StepRecorder
from agentrl.track.sinks import JsonlMetrics, TrajectoryRecorder

WORDS = ("one ", "two ", "three ", "plus ", "minus ", "times ", "is ", "so ")


class MadeRun:
    """A run of which groups and steps can be written one after another."""

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int = 10,
        indexed: bool = True,
        seed: int = 0,
        budget: RecordBudget | None = None,
        agent: str = "envs/calculator.py",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = TrainConfig(run=RunConfig(agent=agent), training=TrainingConfig(num_steps=num_steps), record=RecordConfig(record="all"))
        (folder / "config.json").write_text(to_json(config))
        self.folder, self._random, self._seconds = folder, random.Random(seed), 1_790_000_000.0
        self.groups = 0
        self._recorders = {
            "launch": LaunchRecorder(folder / "launches.jsonl"),
            "metrics": JsonlMetrics(folder / "metrics.jsonl"),
            "groups": GroupRecorder(folder / "groups.jsonl", self._clock),
            "steps": StepRecorder(folder / "steps.jsonl", self._clock),
            "trajectories": TrajectoryRecorder(folder / "trajectories.jsonl", budget=budget, clock=self._clock),
        }
        self._recorders["launch"].on_run_begin(RunBegin(config={}, run_dir=folder, resumed=False, step=0))
        self._indexed = indexed

    def _clock(self) -> float:
        self._seconds += 0.01
        return self._seconds

    def group(
        self,
        step: int,
        *,
        members: int = 4,
        turns: int = 2,
        tokens: int = 8,
        task: str = "",
        verdict: str = "kept",
        reason: str = "",
        attempt: int = 0,
        status: Status = Status.FINISHED,
        text: str = "",
        tool: str = "",
        images: tuple[tuple[int, str], ...] = (),
    ) -> int:
        """Write a group that was started when `step` was next, and return its number."""
        number = self.groups
        self.groups += 1
        named = Task("How much?", label=3, id=task or f"task-{number % 5}", position=number)
        played = tuple(self._episode(number, index, step, turns, tokens, status, text, tool) for index in range(members))
        played = tuple(replace(trajectory, images=images) for trajectory in played)
        group = Group(group_id=number, task=named, trajectories=played)
        group_request = GroupRequest(
            group_id=number, task=named, n_samples_per_prompt=members, version=step - 1, attempt=attempt, record=members
        )
        summary = summarize(group, seconds=0.5, records=group_records(group_request, group))
        self.judged(
            GroupJudged(group_id=number, attempt=attempt, task=named, verdict=verdict, reason=reason, summary=summary, version=step - 1)
        )
        return number

    def judged(self, event: GroupJudged) -> None:
        self._recorders["groups"].on_group_judged(event)
        self._recorders["trajectories"].on_group_judged(event)

    def _episode(self, group: int, index: int, step: int, turns: int, tokens: int, status: Status, text: str, tool: str = "") -> Trajectory:
        draw, name = self._random, f"{group}-0-{index}"
        made = tuple(self._turn(number, step, tokens, text) for number in range(turns))
        failed = not status.trainable
        reward = None if failed else float(draw.random() < 0.1 * step)
        spans = [Span("reset", None, 0.0, 0.01)]
        for number in range(turns):
            spans.append(Span("generate", number, 0.02 + 0.2 * number, 0.1))
            spans += [Span(f"tool:{tool}", number, 0.13 + 0.2 * number, 0.03)] if tool else []
            spans.append(Span("step", number, 0.12 + 0.2 * number, 0.05))
        return Trajectory(
            trajectory_id=name,
            episode_id=name,
            group_id=group,
            turns=made,
            status=status,
            reward=reward,
            score=reward,
            reward_parts={} if failed else {"right": reward or 0.0},
            error="RuntimeError: the tool broke\nmore" if failed else None,
            timings={"generate_s": 0.1 * turns, "env_s": 0.06, "total_s": 0.4},
            spans=tuple(spans),
        )

    def _turn(self, number: int, step: int, tokens: int, text: str) -> Turn:
        draw = self._random
        ids = [draw.randrange(5, 200) for _ in range(tokens)]
        return Turn(
            prompt_ids=ints([draw.randrange(5, 200) for _ in range(6)]),
            token_ids=ints(ids),
            logprobs=floats([-draw.random() for _ in ids]),
            versions=ints([max(0, step - 1 - (place % 2)) for place in range(tokens)]),
            finish_reason=FinishReason.STOP,
            number=number,
            reward=0.5,
            prompt_text="<|user|>How much?<|end|><|assistant|>",
            text=text or "".join(draw.choice(WORDS) for _ in ids),
        )

    def step(self, step: int, groups: list[int], *, metrics: dict[str, float] | None = None, annotated: bool = True) -> None:
        """Write a step that trained on groups."""
        row = {
            "time_s": float(step),
            "reward/mean": 0.1 * step,
            "episode/count": 8.0,
            "tokens": 100.0,
            "mismatch/max": 1e-4,
            **(metrics or {}),
        }
        times = {
            "begin_s": 0.0,
            "taken_s": 0.2,
            "trained_s": 0.5,
            "exporting_s": 0.55,
            "exported_s": 0.6,
            "publishing_s": 0.6,
            "live_s": 0.7,
        }
        self._recorders["steps"].on_step_end(StepEnd(step=step, metrics=row, groups=tuple(groups), times={**times, "now_s": 0.8}))
        self._recorders["metrics"].on_metrics(MetricsRow(step=step, metrics=row))
        if annotated:
            self.annotate(step, groups)

    def annotate(self, step: int, groups: list[int]) -> None:
        """Write the learner's figures for all recorded episodes of groups."""
        with (self.folder / "annotations.jsonl").open("a") as file:
            for record in read(self.folder / "trajectories.jsonl"):
                if record["group_id"] in groups:
                    file.write(annotation_of(record, step).line() + "\n")

    def close(self) -> Path:
        for name in ("groups", "steps", "trajectories"):
            self._recorders[name].on_run_end(None)
        self._recorders["metrics"].on_run_end(None)
        if not self._indexed:
            (self.folder / "trajectories.index.jsonl").unlink()
        return self.folder


def annotation_of(record: dict[str, Any], step: int) -> Annotation:
    """Figures that can be told apart: the learner's log-probability is 0.001 below the engine's, the entropy counts from 0."""
    logprobs = np.array([value for turn in record["turns"] if not turn.get("masked") for value in turn["logprobs"]], np.float32)
    count = len(logprobs)
    values = {"logprob": logprobs - np.float32(0.001), "ratio": np.ones(count), "weight": np.ones(count)}
    values |= {"advantage": np.full(count, 0.5), "entropy": np.arange(count), "loss": np.linspace(-1, 1, count)}
    figures = {name: floats(values[name].astype(np.float32)) for name in FIGURES if name in values}
    return Annotation(trajectory_id=record["trajectory_id"], step=step, figures=figures, masks=(np.arange(count) % 4 == 3).astype(np.uint8))


def read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def small_run(folder: Path, *, steps: int = 3, indexed: bool = True, **options: Any) -> Path:
    """A run of a few steps with two groups each, one filtered group beside each step, and annotations of all steps but the last."""
    run = MadeRun(folder, num_steps=steps, indexed=indexed)
    for step in range(1, steps + 1):
        kept = [run.group(step, **options) for _ in range(2)]
        run.group(step, verdict="filtered", reason="all_same", **options)
        run.step(step, kept, annotated=step < steps)
    return run.close()
