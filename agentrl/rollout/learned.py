"""Rewards that trained models give to episodes which have ended, beside those of the environment."""

from __future__ import annotations

import asyncio
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.core.errors import AgentRLError
from agentrl.core.scoring import ScoreAnswer, Scorer, ScoreRequest, ScorerFacts, clipped, normalized
from agentrl.core.types import GroupRequest, Message, Status, Trajectory, Turn, as_messages
from agentrl.env.images import lifted
from agentrl.env.plan import ANSWER
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.penalties import stop_properly
from agentrl.rollout.step_rewards import with_reward, with_steps

METRIC = "reward_model/"
"""Beginning of the names of the metrics that reward models add to an episode."""
MOST_SCORE = 10.0
"""Scores are cut to this range around 0, after they are normalised and before they are weighted."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """Scores of one trajectory by one model: an entry per turn that it judged, and the index of each of these turns."""

    places: tuple[int, ...]
    values: tuple[float, ...]
    was_cut: bool
    ends: tuple[int, ...] = ()  # of a process reward model, as in `ScoreAnswer`


class LearnedRewards:
    """Adds the rewards of ``--reward-model`` to trajectories; one per rollout worker.

    A model of whole episodes scores the last context of a trajectory, and its reward is that of the last turn; a process reward model
    scores each turn. Each score is normalised, clipped and weighted; what a budget cut is punished as the rest of the reward is. The
    environment's score stays what it was; only where the models alone judge is it made of theirs, by the logistic function. A model that
    fails makes a failed episode, never a reward of 0.
    """

    def __init__(self, settings: EpisodePlan, scorers: Mapping[str, Scorer], agent: str) -> None:
        self._settings, self._scorers = settings, dict(scorers)
        self._weights = dict(zip(settings.reward.names, settings.reward.weights, strict=True))
        self._alone = agent == ANSWER
        self._facts: dict[str, ScorerFacts] = {}

    async def start(self) -> None:
        """Ask every model what it is; returns when all are loaded."""
        facts = await asyncio.gather(*(scorer.facts() for scorer in self._scorers.values()))
        self._facts = dict(zip(self._scorers, facts, strict=True))

    async def judge(self, group_request: GroupRequest, trajectories: tuple[Trajectory, ...], codec: ChatCodec) -> tuple[Trajectory, ...]:
        """Return the trajectories of one episode with their learned rewards; if a model fails, all of them with the status of a failure."""
        wanted = [index for index, trajectory in enumerate(trajectories) if _judged(trajectory)]
        if not wanted:
            return trajectories
        start, limit = time.perf_counter(), self._settings.rollout.reward_timeout_s
        try:
            async with asyncio.timeout(limit):
                scored = await asyncio.gather(*(self._score(group_request, trajectories[index], codec) for index in wanted))
        except TimeoutError:
            return failed(trajectories, Status.TIMEOUT, f"the reward models gave no score within {limit:g} s (--reward-timeout-s)")
        except AgentRLError as error:
            return failed(trajectories, Status.ENV_ERROR, f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        judged = list(trajectories)
        for index, by_model in zip(wanted, scored, strict=True):
            judged[index] = self._rewarded(group_request, trajectories[index], by_model, codec)
        return tuple(replace(trajectory, timings={**trajectory.timings, "reward_s": seconds}) for trajectory in judged)

    async def _score(self, group_request: GroupRequest, trajectory: Trajectory, codec: ChatCodec) -> dict[str, _Scored]:
        judged = [part for part in contexts(trajectory.turns) if any(not trajectory.turns[index].masked for index in part)]
        requests = [self._request(group_request, trajectory.turns, part, codec) for part in judged]
        found: dict[str, _Scored] = {}
        for name, scorer in self._scorers.items():
            per_step = self._facts[name].per_step
            asked = list(zip(judged, requests, strict=True)) if per_step else [(judged[-1], requests[-1])]
            answers: Sequence[ScoreAnswer] = await asyncio.gather(*(scorer.score(request) for _, request in asked))
            places = [index for part, _ in asked for index in part if not trajectory.turns[index].masked]
            values = [value for answer in answers for value in answer.values]
            ends = tuple(end for answer in answers for end in answer.ends)
            cut = any(answer.was_cut for answer in answers)
            found[name] = _Scored(tuple(places if per_step else places[-1:]), tuple(values), cut, ends)
        return found

    def _request(self, group_request: GroupRequest, turns: Sequence[Turn], part: Sequence[int], codec: ChatCodec) -> ScoreRequest:
        text, spans = "", []
        for index in part:
            text += turns[index].prompt_text
            if not turns[index].masked:
                spans.append((len(text), len(text) + len(turns[index].text)))
            text += turns[index].text
        messages = None
        images = tuple(placed.image.data for index in part for placed in turns[index].images)
        if self._alone:
            system = self._settings.data.system_prompt
            before = as_messages(group_request.task.prompt)
            before = as_messages(lifted(before, group_request.task.images)[0]) if images else before
            before = [Message(role="system", content=system), *before] if system and before[0]["role"] != "system" else before
            answer = codec.decode_action(turns[part[-1]].token_ids.tolist())
            messages = (*before, Message(role="assistant", content=answer))
        return ScoreRequest(text=text, spans=tuple(spans), messages=messages, images=images)

    def _rewarded(self, group_request: GroupRequest, trajectory: Trajectory, scored: Mapping[str, _Scored], codec: ChatCodec) -> Trajectory:
        reward, own = self._settings.reward, self._settings.reward.environment_reward_weight
        rewards = [own * turn.reward for turn in trajectory.turns]
        steps = [list[tuple[int, float]]() for _ in trajectory.turns]
        metrics, parts = dict(trajectory.metrics), {name: own * value for name, value in trajectory.reward_parts.items()}
        if not self._alone:
            metrics["reward"] = math.fsum(turn.reward for turn in trajectory.turns)
            parts["environment"] = own * metrics["reward"]
        for name, found in scored.items():
            scale = None if group_request.eval_sampling else group_request.reward_scales.get(name) or self._own_scale(name)
            values = [normalized(value, scale) for value in found.values]
            cut = [clipped(value, MOST_SCORE) for value in values]
            paid = [self._weights[name] * self._punished(value, trajectory) for value in cut]
            for place, value in zip(found.places, paid, strict=True):
                rewards[place] += value
            if reward.process_reward_at == "step" and found.ends:
                for place, end, value in zip(found.places, found.ends, paid, strict=True):
                    steps[place].append((end, value))
            parts[f"{METRIC}{name}"] = math.fsum(paid)
            metrics[f"{METRIC}{name}"] = math.fsum(found.values) / len(found.values)
            metrics[f"{METRIC}{name}/clipped"] = sum(map(operator.ne, values, cut)) / len(cut)
            metrics[f"{METRIC}{name}/cut"] = float(found.was_cut)
        turns = tuple(
            with_steps(with_reward(turn, value, own), more, codec.decode)
            for turn, value, more in zip(trajectory.turns, rewards, steps, strict=True)
        )
        total = math.fsum(rewards)
        return replace(
            trajectory,
            turns=turns,
            reward=total,
            score=self._probability(scored) if self._alone else trajectory.score,
            reward_parts=parts,
            metrics=metrics,
            model_scores={name: found.values for name, found in scored.items()},
        )

    def _own_scale(self, name: str) -> tuple[float, float] | None:
        """Mean and deviation that the model itself states, which count until a step has been trained."""
        return self._facts[name].scale if self._settings.reward.normalize_reward else None

    def _punished(self, value: float, trajectory: Trajectory) -> float:
        """A learned reward as ``--stop-properly-penalty`` leaves it; a penalty below 0 has replaced the episode's reward already."""
        penalty, cut = self._settings.penalty.stop_properly_penalty, trajectory.truncated_by_length
        if cut and penalty is not None and penalty < 0:
            return 0.0
        return stop_properly(value, truncated=cut, penalty=penalty)

    def _probability(self, scored: Mapping[str, _Scored]) -> float:
        total = math.fsum(self._weights[name] * math.fsum(found.values) / len(found.values) for name, found in scored.items())
        # The logistic function in a form that does not overflow.
        return 0.5 * (1.0 + math.tanh(0.5 * total))


def _judged(trajectory: Trajectory) -> bool:
    return trajectory.status.trainable and not trajectory.frozen and any(not turn.masked for turn in trajectory.turns)


def contexts(turns: Sequence[Turn]) -> list[list[int]]:
    """Return the indices of the turns of each context, in order; a fresh turn begins one."""
    parts: list[list[int]] = []
    for index, turn in enumerate(turns):
        if turn.fresh or not parts:
            parts.append([])
        parts[-1].append(index)
    return parts


def failed(trajectories: Sequence[Trajectory], status: Status, error: str) -> tuple[Trajectory, ...]:
    """Return the trajectories of an episode as those of a failed one."""
    return tuple(replace(trajectory, status=status, reward=None, score=None, error=error) for trajectory in trajectories)
