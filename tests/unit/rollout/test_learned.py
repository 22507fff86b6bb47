"""Learned rewards on trajectories: where they go, how they are scaled, and failures that are no rewards."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from agentrl import StepResult
from agentrl.config.sections import changed
from agentrl.core.errors import RewardError
from agentrl.core.images import PlacedImage
from agentrl.core.scoring import ScoreAnswer, ScoreRequest, ScorerFacts
from agentrl.core.types import EvalSampling, FinishReason, GroupRequest, Status, Trajectory
from agentrl.env.plan import ANSWER
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.learned import LearnedRewards
from agentrl.rollout.plan import RewardConfig
from tests.image_support import picture, reader_of
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, PATIENT, TASK, Scene, env_class, says

pytestmark = pytest.mark.anyio

GROUP_REQUEST = GroupRequest(group_id=3, task=TASK, n_samples_per_prompt=1, version=0)


class Fixed:
    """A scorer that gives fixed values; an error is raised, and `None` never answered."""

    def __init__(
        self,
        *values: float | Exception | None,
        per_step: bool = False,
        scale: tuple[float, float] | None = None,
        ends: tuple[int, ...] = (),
    ) -> None:
        self._values, self._facts, self._ends = values, ScorerFacts(per_step=per_step, scale=scale), ends
        self.requests: list[ScoreRequest] = []

    async def start(self) -> None:
        """Nothing to load."""

    async def facts(self) -> ScorerFacts:
        return self._facts

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        self.requests.append(request)
        for value in self._values:
            if isinstance(value, Exception):
                raise value
            if value is None:
                await asyncio.Event().wait()
        return ScoreAnswer(tuple(value for value in self._values if isinstance(value, float)), ends=self._ends)

    async def close(self) -> None:
        """Nothing to close."""


async def played(turns: int = 1, reward: float = 1.0) -> tuple[Trajectory, ...]:
    """An episode whose turns say "one", "two", ...; each earns `reward`."""
    env = env_class(lambda state: StepResult(reward, observation="go on", terminated=state["turn"] + 1 == turns))
    return await Scene(env, ScriptedEngine(answer=says("one", "two", "three")), PATIENT, GROUP_REQUEST).play_all()


async def judge(
    scorers: dict[str, Fixed],
    trajectories: tuple[Trajectory, ...],
    group_request: GroupRequest = GROUP_REQUEST,
    agent: str = "env.py",
    **settings: Any,
) -> Trajectory:
    own = {name: settings.pop(name) for name in list(settings) if name in RewardConfig.__dataclass_fields__}
    reward = RewardConfig(reward_model=tuple(scorers), **own)
    full: EpisodePlan = replace(changed(PATIENT, **settings), reward=reward)
    learned = LearnedRewards(full, scorers, agent)
    await learned.start()
    (judged,) = await learned.judge(group_request, trajectories, CODEC)
    return judged


async def test_weighted_scores_join_the_environments_reward_at_the_last_turn() -> None:
    scorers = {"a": Fixed(2.0), "b": Fixed(-1.0)}
    found = await judge(scorers, await played(2), reward_model_weights=(0.5, 3.0), environment_reward_weight=0.25)
    assert [turn.reward for turn in found.turns] == [0.25, 0.25 + 0.5 * 2.0 - 3.0]
    assert found.reward == pytest.approx(0.5 + 1.0 - 3.0)
    assert found.score == 1.0  # the environment's, of a reward of 2
    assert found.reward_parts == {"environment": 0.5, "reward_model/a": 1.0, "reward_model/b": -3.0}
    assert found.metrics["reward"] == 2.0
    assert found.metrics["reward_model/a"] == 2.0
    assert found.model_scores == {"a": (2.0,), "b": (-1.0,)}


async def test_the_model_reads_what_the_policy_read_and_wrote() -> None:
    scorer = Fixed(1.0)
    trajectories = await played(2)
    await judge({"a": scorer}, trajectories)
    ((request,), turns) = scorer.requests, trajectories[0].turns
    assert request.text == "".join(turn.prompt_text + turn.text for turn in turns)
    assert [request.text[begin:end] for begin, end in request.spans] == ["one<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize("agent", ["env.py", ANSWER])
async def test_the_model_sees_the_pictures_of_the_context_in_their_order(agent: str, vision_model: str) -> None:
    images = reader_of(vision_model).read_here([picture(1), picture(2)])
    (trajectory,), scorer = await played(2), Fixed(1.0)
    turns = tuple(replace(turn, images=(PlacedImage(0, image),)) for turn, image in zip(trajectory.turns, images, strict=True))
    asked = replace(GROUP_REQUEST, task=replace(TASK, images=("a.png", "b.png")))
    await judge({"a": scorer}, (replace(trajectory, turns=turns),), asked, agent)
    (request,) = scorer.requests
    assert request.images == (images[0].data, images[1].data)
    parts = [part["type"] for part in request.messages[0]["content"]] if request.messages else []
    assert parts == (["image", "image", "text"] if agent == ANSWER else [])


async def test_a_process_reward_model_pays_each_turn() -> None:
    found = await judge({"p": Fixed(0.25, 0.75, per_step=True)}, await played(2, reward=0.0), reward_model_weights=(2.0,))
    assert [turn.reward for turn in found.turns] == [0.5, 1.5]
    assert found.metrics["reward_model/p"] == 0.5
    assert found.model_scores == {"p": (0.25, 0.75)}


async def test_a_process_reward_is_paid_at_the_worst_step_if_asked() -> None:
    scorer = Fixed(0.25, 0.75, per_step=True, ends=(1, 3))
    found = await judge({"p": scorer}, await played(2), reward_model_weights=(2.0,), process_reward_at="step")
    assert [turn.reward for turn in found.turns] == [1.5, 2.5]
    for turn, end, value in zip(found.turns, (1, 3), (0.5, 1.5), strict=True):
        ((place, paid),) = turn.step_rewards
        assert paid == value
        assert len(CODEC.decode(turn.token_ids[: place + 1].tolist())) >= end > len(CODEC.decode(turn.token_ids[:place].tolist()))
    usual = await judge({"p": scorer}, await played(2), reward_model_weights=(2.0,))
    assert [turn.step_rewards for turn in usual.turns] == [(), ()]


async def test_scores_are_normalised_by_the_group_request_then_clipped_and_counted() -> None:
    group_request = replace(GROUP_REQUEST, reward_scales={"a": (1.0, 0.5)})
    found = await judge({"a": Fixed(6.5), "b": Fixed(3.0)}, await played(), group_request)
    assert found.reward == 1.0 + 10.0 + 3.0  # (6.5 - 1) / 0.5 = 11 is clipped, the other is not normalised
    assert (found.metrics["reward_model/a/clipped"], found.metrics["reward_model/b/clipped"]) == (1.0, 0.0)
    measured = await judge({"a": Fixed(3.0)}, await played(), replace(group_request, eval_sampling=EvalSampling(name="eval", seed=1)))
    assert measured.reward == 4.0  # figures of different steps are compared, so they are not normalised


async def test_until_a_step_is_trained_the_models_own_scale_counts() -> None:
    scorer = {"a": Fixed(3.0, scale=(2.0, 4.0))}
    assert (await judge(scorer, await played(), normalize_reward=True)).reward == 1.25
    assert (await judge(scorer, await played())).reward == 4.0


async def test_models_alone_make_the_score_too() -> None:
    scorer = Fixed(0.8)
    found = await judge({"a": scorer}, await played(reward=0.0), agent=ANSWER, system_prompt="Be brief.")
    assert found.score == pytest.approx(1 / (1 + math.exp(-0.8)))
    assert "environment" not in found.reward_parts
    assert scorer.requests[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is one plus two?"},
        {"role": "assistant", "content": "one"},
    )


async def test_a_cut_episode_is_punished_for_its_learned_reward_too() -> None:
    (whole,) = await played(reward=0.0)
    cut = (replace(whole, turns=(replace(whole.turns[0], finish_reason=FinishReason.LENGTH),)),)
    assert (await judge({"a": Fixed(2.0)}, cut, stop_properly_penalty=0.5)).reward == 1.0
    assert (await judge({"a": Fixed(2.0)}, cut, stop_properly_penalty=-1.0)).reward == 0.0  # the -1 was paid before
    assert (await judge({"a": Fixed(2.0)}, (whole,), stop_properly_penalty=0.5)).reward == 2.0


async def test_a_model_that_fails_makes_a_failed_episode() -> None:
    failed = await judge({"a": Fixed(1.0), "b": Fixed(RewardError("b: gone"))}, await played())
    assert (failed.status, failed.reward, failed.score) == (Status.ENV_ERROR, None, None)
    assert "b: gone" in (failed.error or "")
    late = await judge({"a": Fixed(None)}, await played(), reward_timeout_s=0.05)
    assert (late.status, late.reward) == (Status.TIMEOUT, None)
    assert "--reward-timeout-s" in (late.error or "")


async def test_what_failed_before_is_not_judged() -> None:
    (whole,) = await played()
    scorer = Fixed(1.0)
    broken = replace(whole, status=Status.ENV_ERROR, reward=None, score=None)
    assert await judge({"a": scorer}, (broken,)) is broken
    frozen = replace(whole, frozen=True)
    assert await judge({"a": scorer}, (frozen,)) is frozen
    assert scorer.requests == []


async def test_only_the_last_context_is_judged_and_masked_turns_are_not_paid() -> None:
    (whole,) = await played(3, reward=0.0)
    first, second, third = whole.turns
    branch = replace(whole, turns=(first, replace(second, fresh=True), replace(third, masked="forced")))
    outcome, steps = Fixed(1.0), Fixed(0.5, per_step=True)
    found = await judge({"o": outcome, "p": steps}, (branch,))
    assert [turn.reward for turn in found.turns] == [0.5, 1.5, 0.0]
    assert outcome.requests[0].text.startswith(second.prompt_text)
    assert len(steps.requests) == 2
