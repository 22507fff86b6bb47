"""Runs of which every answer, label and reward is given, in the files that a training writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from agentrl.assets import tiny_model_path
from agentrl.check.tokenizer import FileTokenizer
from agentrl.core.callbacks import GroupJudged
from agentrl.core.summaries import summarize
from agentrl.core.types import EvalSampling, FinishReason, Group, GroupRequest, Status, Task, Trajectory, Turn, floats, ints
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.examine import examine
from agentrl.doctor.verdicts import Examination
from agentrl.inspect.reader import RunReader
from agentrl.rollout.records import group_records
from tests.run_files import MadeRun


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One episode to write; without a reward it failed."""

    text: str = ""
    reward: float | None = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    cut: bool = False
    status: Status = Status.FINISHED
    turns: int = 1
    logprob: float = -0.5


class PlantedRun:
    """A run whose groups are given answer by answer; each step trains the groups since the one before."""

    def __init__(self, folder: Path, agent: str = "envs/frozen_lake.py") -> None:
        self.made = MadeRun(folder, agent=agent)
        self.folder, self.steps = folder, 0
        self._groups: list[int] = []

    def group(self, task: Task, answers: Sequence[Answer], *, evaluation: str = "") -> None:
        number = self.made.groups
        self.made.groups += 1
        played = tuple(_trajectory(number, index, self.steps, answer) for index, answer in enumerate(answers))
        sampling = EvalSampling(name=evaluation, seed=0, temperature=1.0) if evaluation else None
        request = GroupRequest(
            group_id=number, task=task, n_samples_per_prompt=len(answers), version=self.steps, record=len(answers), eval_sampling=sampling
        )
        group = Group(group_id=number, task=task, trajectories=played)
        summary = summarize(group, seconds=0.5, records=group_records(request, group))
        event = GroupJudged(group_id=number, attempt=0, task=task, verdict="kept", reason="", summary=summary, version=self.steps)
        if evaluation:
            self.made._recorders["trajectories"].on_group_judged(event)
        else:
            self.made.judged(event)
            self._groups.append(number)

    def step(self, **metrics: float) -> None:
        self.steps += 1
        names = {name.replace("__", "/"): value for name, value in metrics.items()}
        self.made.step(self.steps, self._groups, metrics=names, annotated=False)
        self._groups = []

    def examined(self) -> Examination:
        self.made.close()
        return examine(Evidence(RunReader(self.folder)), str(self.folder))


@cache
def _tokenizer() -> FileTokenizer:
    return FileTokenizer(tiny_model_path())


def _trajectory(group: int, index: int, version: int, answer: Answer) -> Trajectory:
    name = f"{group}-0-{index}"
    turns = tuple(_turn(number, version, answer) for number in range(answer.turns))
    failed = not answer.status.trainable
    return Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id=group,
        turns=turns,
        status=answer.status,
        reward=None if failed else answer.reward,
        score=None if failed or answer.reward is None else min(max(answer.reward, 0.0), 1.0),
        reward_parts=answer.parts,
        error="RuntimeError: the service does not answer" if failed else None,
    )


def _turn(number: int, version: int, answer: Answer) -> Turn:
    # Tokens of the bundled model, so that a replay reads the same text; the last one ends the turn.
    ids = [*_tokenizer()(answer.text, add_special_tokens=False).input_ids, *([] if answer.cut else [1])]
    return Turn(
        prompt_ids=ints([5, 6, 7]),
        token_ids=ints(ids),
        logprobs=floats([answer.logprob] * len(ids)),
        versions=ints([version] * len(ids)),
        finish_reason=FinishReason.LENGTH if answer.cut else FinishReason.STOP,
        number=number,
        reward=answer.reward or 0.0,
        prompt_text="<|user|>How much?<|end|><|assistant|>",
        text=answer.text,
    )
