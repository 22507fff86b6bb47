"""Whole episodes: tokens, budgets, sampling, rewards, and every way to fail."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl import AgentInstance, Message, ResetResult, StepResult, Task
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import EngineDeadError, EngineError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import EvalSampling, FinishReason, Status, derive_seed
from agentrl.learner.batch import merge_turns
from agentrl.resolve.parts import episode_plan
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, SETTINGS, TASK, Scene, env_class, says
from tests.unit.rollout.templates import tokenizer

pytestmark = pytest.mark.anyio


def text_of(ids: Sequence[int]) -> str:
    return CODEC.decode(ids)


def dialogue(*messages: tuple[str, str]) -> str:
    chat = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer("chatml").apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def two_turns(state: Any) -> StepResult:
    if state.turn == 0:
        return StepResult(0.25, [Message(role="tool", content="3")], info={"calls": 1.0})
    return StepResult(0.5, terminated=True, info={"calls": 3.0, "late": 7.0}, reward_parts={"answer": 0.5})


async def test_the_engine_sees_every_token_so_far_and_nothing_is_tokenised_again() -> None:
    scene = Scene(env_class(two_turns), ScriptedEngine(answer=says("add", "three")))
    trajectory = await scene.play()
    assert trajectory.status is Status.FINISHED
    first, second = scene.engine.requests
    assert text_of(first.prompt_ids) == dialogue(("user", TASK.prompt))  # type: ignore[arg-type]
    assert text_of(second.prompt_ids) == dialogue(("user", TASK.prompt), ("assistant", "add"), ("tool", "3"))  # type: ignore[arg-type]
    one, two = trajectory.turns
    assert second.prompt_ids.tolist() == [*one.prompt_ids, *one.token_ids, *two.prompt_ids]
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*second.prompt_ids, *two.token_ids]
    assert text_of(two.token_ids) == "three<|im_end|>"


async def test_rewards_add_up_scores_default_and_metrics_are_means() -> None:
    trajectory = await Scene(env_class(two_turns), ScriptedEngine(answer=says("add", "three"))).play()
    assert trajectory.reward == 0.75
    assert trajectory.score == 0.75
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.5]
    assert trajectory.metrics == {"calls": 2.0, "late": 7.0}
    assert trajectory.reward_parts == {"answer": 0.5}
    assert set(trajectory.timings) == {"generate_s", "env_s", "total_s"}


@pytest.mark.parametrize(("reward", "score", "expected"), [(5.0, None, 1.0), (-2.0, None, 0.0), (-2.0, 0.5, 0.5), (0.3, None, 0.3)])
async def test_the_score_is_the_reward_clipped_unless_given(reward: float, score: float | None, expected: float) -> None:
    scene = Scene(env_class(lambda state: StepResult(reward, terminated=True, score=score)))
    trajectory = await scene.play()
    assert (trajectory.reward, trajectory.score) == (reward, expected)


async def test_what_step_is_told() -> None:
    seen: list[Any] = []

    def step(state: Any) -> StepResult:
        seen.append(dict(state))
        assert state.action_text == state["action_text"]
        return two_turns(state)

    await Scene(env_class(step), ScriptedEngine(answer=says("add", "three"))).play()
    assert [state["action_text"] for state in seen] == ["add", "three"]
    assert seen[1]["observation_text"] == dialogue(("user", TASK.prompt), ("assistant", "add"), ("tool", "3"))  # type: ignore[arg-type]
    assert [state["turn"] for state in seen] == [0, 1]
    assert (seen[0]["label"], seen[0]["task"], seen[0]["finish_reason"]) == ("three", TASK, "stop")
    assert seen[0]["sampling_params"]["max_tokens"] == 32


async def test_the_dictionary_form_appends_raw_text_with_its_control_tokens() -> None:
    def step(state: Any) -> dict[str, Any]:
        over = "three" in state["action_text"]
        return {"rewards": float(over), "environment_feedback": "\n<|im_start|>user\nAgain<|im_end|>\n", "done": over, "scores": 0.5}

    trajectory = await Scene(env_class(step), ScriptedEngine(answer=says("two", "three"))).play()
    assert text_of(trajectory.turns[1].prompt_ids) == "\n<|im_start|>user\nAgain<|im_end|>\n"
    assert trajectory.turns[1].prompt_ids[1] == CODEC.encode_text("<|im_start|>")[0]
    assert (trajectory.reward, trajectory.score) == (1.0, 0.5)


async def test_an_observation_that_spells_a_control_token_stays_text() -> None:
    def step(state: Any) -> StepResult:
        return StepResult(0.0, "<|im_end|>") if state.turn == 0 else StepResult(1.0, terminated=True)

    trajectory = await Scene(env_class(step), ScriptedEngine(answer=says("a", "b"))).play()
    ids = trajectory.turns[1].prompt_ids.tolist()
    assert text_of(ids) == "\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(CODEC.encode_text("<|im_end|>")[0]) == 1


async def test_reset_may_replace_the_prompt_and_the_sampling() -> None:
    class Env(AgentInstance):
        async def reset(self, state: Any) -> ResetResult:
            return ResetResult("Go", info={"seeded": 1.0}, sampling={"temperature": 0.5}, images=["b.png"])

        async def step(self, state: Any) -> StepResult:
            return StepResult(0.0, terminated=True)

    scene = Scene(Env)
    scene.group_request = replace(scene.group_request, task=replace(TASK, images=("a.png",)))
    trajectory = await scene.play()
    (request,) = scene.engine.requests
    assert text_of(request.prompt_ids) == dialogue(("user", "Go"))
    assert (request.sampling.temperature, request.images) == (0.5, ("a.png", "b.png"))
    assert trajectory.turns[0].temperature == 0.5
    assert trajectory.metrics == {"seeded": 1.0}


async def test_sampling_changes_hold_for_later_turns_and_handing_it_back_changes_nothing() -> None:
    def step(state: Any) -> dict[str, Any]:
        params = state["sampling_params"]
        if state["turn"] == 0:
            params.temperature, params["max_tokens"], params.stop = 0.5, 3, ["x"]
        return {"rewards": 0.0, "environment_feedback": "go", "sampling_params": params}

    scene = Scene(env_class(step))
    trajectory = await scene.play()
    sampled = [request.sampling for request in scene.engine.requests]
    assert [(s.temperature, s.max_tokens, s.stop) for s in sampled[:3]] == [(1.0, 32, ()), (0.5, 3, ("x",)), (0.5, 3, ("x",))]
    assert [turn.temperature for turn in trajectory.turns] == [1.0, 0.5, 0.5, 0.5]
    assert len({s.seed for s in sampled}) == 4


TRAINING = replace(SETTINGS, is_training=True, weighs_ratios=True)
NO_RATIOS = replace(TRAINING, weighs_ratios=False)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}])
@pytest.mark.parametrize("method", ["reset", "step"])
async def test_truncated_sampling_of_a_turn_is_refused_where_ratios_are_computed(method: str, sampling: dict[str, Any]) -> None:
    def step(state: Any) -> StepResult:
        return StepResult(0.0, "go", sampling=sampling if (method, state.turn) == ("step", 1) else None)

    changes = {"reset": lambda self, state: ResetResult(None, sampling=sampling)} if method == "reset" else {}
    env = env_class(step, **changes)
    refused = await Scene(env, settings=TRAINING).play()
    (name, value), where = *sampling.items(), "reset" if method == "reset" else "step (turn 1)"
    assert refused.status is Status.ENV_ERROR
    assert f"{where} returned sampling['{name}'] = {value}: truncated sampling biases" in (refused.error or "")
    assert "--off-policy none" in (refused.error or "")
    measured = TRAINING.for_eval_sampling(EvalSampling(name="eval", seed=1))
    reused = changed(TrainConfig(), off_policy="none", old_logprobs="behaviour")
    assert [episode_plan(config).weighs_ratios for config in (TrainConfig(), reused, changed(reused, old_logprobs="recomputed"))] == [
        *(True, True, False)
    ]
    for settings in (NO_RATIOS, SETTINGS, measured):
        assert (await Scene(env, settings=settings).play()).error is None


async def test_settings_that_no_step_may_choose_can_be_handed_back() -> None:
    """Evaluation is greedy, and an agent that returns what it was given must not fail there."""
    settings = changed(SETTINGS, temperature=0.0)

    def step(state: Any) -> dict[str, Any]:
        return {"rewards": 0.0, "environment_feedback": "go", "sampling_params": state["sampling_params"]}

    trajectory = await Scene(env_class(step), settings=settings).play()
    assert (trajectory.error, [turn.temperature for turn in trajectory.turns]) == (None, [0.0] * 4)
    chosen = await Scene(env_class(lambda state: StepResult(0.0, "go", sampling={"temperature": 0.0}))).play()
    assert "sampling['temperature'] = 0.0: must be from 0.01 to 2" in str(chosen.error)


async def test_seeds_depend_on_run_task_epoch_member_turn_and_attempt() -> None:
    async def seeds(index: int = 0, **group_request: Any) -> list[int | None]:
        scene = Scene(env_class(lambda state: StepResult(0.0, "more")))
        scene.group_request = replace(scene.group_request, **group_request)
        await scene.play(index)
        return [request.sampling.seed for request in scene.engine.requests]

    base = await seeds()
    assert base[1] == derive_seed(5, "sum", 0, 0, 1)
    assert base == await seeds(group_id=99, version=7)
    others = [await seeds(1), await seeds(attempt=1), await seeds(task=replace(TASK, epoch=1)), await seeds(task=replace(TASK, id="x"))]
    assert len({seed for run in (base, *others) for seed in run}) == 5 * len(base)


async def test_the_environments_seed_is_the_same_in_a_group_and_the_tasks_own_if_it_has_one() -> None:
    seen = []

    class Env(AgentInstance):
        async def reset(self, state: Any) -> None:
            seen.append(state.seed)

        async def step(self, state: Any) -> StepResult:
            return StepResult(0.0, terminated=True)

    scene = Scene(Env)
    await scene.play(0)
    await scene.play(1)
    scene.group_request = replace(scene.group_request, task=replace(TASK, seed=77))
    await scene.play(0)
    assert seen == [derive_seed(5, "sum", 0)] * 2 + [77]


async def test_the_end_token_is_appended_if_a_turn_was_cut() -> None:
    scene = Scene(env_class(two_turns), ScriptedEngine(answer=says("two three~", "three")), changed(SETTINGS, max_new_tokens=2))
    trajectory = await scene.play()
    one, two = trajectory.turns
    assert one.finish_reason is FinishReason.LENGTH
    assert len(one.token_ids) == 2
    assert text_of(two.prompt_ids).startswith("<|im_end|>\n<|im_start|>tool")


async def test_max_turns_truncates_and_the_reward_so_far_counts() -> None:
    trajectory = await Scene(env_class(lambda state: StepResult(0.2, "more"))).play()
    assert trajectory.status is Status.TRUNCATED
    assert len(trajectory.turns) == 4
    assert trajectory.reward == pytest.approx(0.8)


async def test_an_environment_may_truncate() -> None:
    trajectory = await Scene(env_class(lambda state: StepResult(0.2, truncated=True))).play()
    assert (trajectory.status, trajectory.reward, trajectory.overflowed) == (Status.TRUNCATED, 0.2, False)


@pytest.mark.parametrize("words", [200, 100_000])
async def test_an_observation_that_leaves_no_room_ends_the_episode_and_is_noted(words: int) -> None:
    trajectory = await Scene(env_class(lambda state: StepResult(0.2, "more " * words))).play()
    assert (trajectory.status, len(trajectory.turns), trajectory.overflowed) == (Status.TRUNCATED, 1, True)


@pytest.mark.parametrize(("context", "episode"), [(120, 0), (256, 120)])
async def test_no_token_beyond_context_or_episode_budget(context: int, episode: int) -> None:
    settings = changed(SETTINGS, max_turns=50, max_episode_tokens=episode)
    scene = Scene(env_class(lambda state: StepResult(0.1, "more")), ScriptedEngine(max_model_len=context), settings)
    trajectory = await scene.play()
    assert trajectory.status is Status.TRUNCATED
    total = sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in trajectory.turns)
    assert 100 < total <= 120
    assert trajectory.reward == pytest.approx(0.1 * len(trajectory.turns))
    last = scene.engine.requests[-1]
    assert len(last.prompt_ids) + last.sampling.max_tokens <= 120


@pytest.mark.parametrize(
    ("settings", "flag"), [(SETTINGS, "--max-model-len"), (changed(SETTINGS, max_episode_tokens=20), "--max-episode-tokens")]
)
async def test_a_first_prompt_without_room_is_an_error_with_its_flag(settings: Any, flag: str) -> None:
    scene = Scene(env_class(two_turns), settings=settings)
    scene.group_request = replace(scene.group_request, task=Task("x " * 300, id="long"))
    trajectory = await scene.play()
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert flag in str(trajectory.error)
    assert "'long'" in str(trajectory.error)


@pytest.mark.parametrize(
    ("step", "status", "message"),
    [
        (lambda state: 1 / 0, Status.ENV_ERROR, "Env.step raised ZeroDivisionError"),
        (lambda state: StepResult(float("nan"), terminated=True), Status.ENV_ERROR, "returned reward = nan"),
        (lambda state: StepResult(0.0, [{"role": "user", "content": None}]), Status.ENV_ERROR, "content"),  # type: ignore[list-item]
        (
            lambda state: StepResult(0.0, [{"role": "tool", "content": [{"a": 1}]}]),
            Status.ENV_ERROR,
            "Env.step, task 'sum': the chat template of the tokenizer refuses",
        ),
        (lambda state: threading.Event().wait(5), Status.TIMEOUT, "did not return within 1.5 s"),
    ],
)
async def test_failures_of_the_environment_become_a_status_without_a_reward(step: Any, status: Status, message: str) -> None:
    trajectory = await Scene(env_class(step)).play()
    assert (trajectory.status, trajectory.reward, trajectory.score, trajectory.trainable) == (status, None, None, False)
    assert message in str(trajectory.error)


@pytest.mark.parametrize("tools", [5, [object()]])
async def test_tools_that_are_no_schemas_are_the_environments_failure(tools: Any) -> None:
    prompt = [{"role": "user", "content": "x", "tools": tools}]
    trajectory = await Scene(env_class(lambda state: 1.0, reset=lambda self, state: ResetResult(prompt))).play()
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "Env.reset, task 'sum': the tools in the messages are not a list of JSON schemas" in str(trajectory.error)


@pytest.mark.parametrize(
    ("answer", "message"),
    [(EngineError("broken"), "EngineError: broken"), (EngineDeadError("gone"), "EngineDeadError: gone"), ([], "gave no token")],
)
async def test_failures_of_the_engine_become_a_status(answer: Any, message: str) -> None:
    closed = []
    env = env_class(two_turns, close=lambda self: closed.append(True))
    trajectory = await Scene(env, ScriptedEngine(answer=lambda request: answer)).play()
    assert (trajectory.status, trajectory.reward) == (Status.ENGINE_ERROR, None)
    assert message in str(trajectory.error)
    assert closed == [True]


async def test_an_error_that_is_no_engine_error_is_a_bug_and_raised() -> None:
    with pytest.raises(KeyError):
        await Scene(env_class(two_turns), ScriptedEngine(answer=lambda request: KeyError("bug"))).play()


async def test_a_slow_episode_ends_at_its_deadline_with_its_environment_closed() -> None:
    closed = []
    env = env_class(two_turns, close=lambda self: closed.append(True))
    scene = Scene(env, ScriptedEngine(delay=lambda request: 30.0), changed(SETTINGS, episode_timeout_s=0.1))
    trajectory = await scene.play()
    assert trajectory.status is Status.TIMEOUT
    assert "--episode-timeout-s" in str(trajectory.error)
    assert closed == [True]


async def test_cancelling_an_episode_closes_its_environment() -> None:
    closed = asyncio.Event()

    class Env(AgentInstance):
        async def step(self, state: Any) -> StepResult:
            return StepResult(0.0, terminated=True)

        async def close(self) -> None:
            closed.set()

    scene = Scene(Env, ScriptedEngine(delay=lambda request: 30.0))
    playing = asyncio.create_task(scene.play())
    await asyncio.sleep(0.1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert closed.is_set()


async def test_a_version_published_between_two_turns_is_on_the_tokens_of_the_second() -> None:
    engine = ScriptedEngine()

    def step(state: Any) -> StepResult:
        engine.version += 1
        return StepResult(0.0, "more") if state.turn == 0 else StepResult(1.0, terminated=True)

    trajectory = await Scene(env_class(step), engine).play()
    assert [set(turn.versions.tolist()) for turn in trajectory.turns] == [{0}, {1}]
    for turn in trajectory.turns:
        assert np.allclose(turn.logprobs, [-(token % 7 + 1) / 8 for token in turn.token_ids])


async def test_plain_text_prompts_are_taken_as_they_are_without_a_template() -> None:
    scene = Scene(env_class(two_turns), settings=changed(SETTINGS, apply_chat_template=False))
    await scene.play()
    assert text_of(scene.engine.requests[0].prompt_ids) == TASK.prompt


async def test_requests_are_named_apart_and_share_their_episodes_session() -> None:
    scene = Scene(env_class(lambda state: StepResult(0.0, "more")))
    await scene.play(0)
    await scene.play(1)
    requests: list[GenerationRequest] = scene.engine.requests
    assert len({request.request_id for request in requests}) == 8
    assert [request.session for request in requests] == ["3-0-0"] * 4 + ["3-0-1"] * 4
    assert all(set(CODEC.end_token_ids) <= set(request.sampling.stop_token_ids) for request in requests)


async def test_a_megabyte_is_not_encoded_to_find_that_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    render = CODEC.encode_marked
    monkeypatch.setattr(CODEC, "encode_marked", lambda text, table: (encoded.append(len(text)), render(text, table))[1])
    trajectory = await Scene(env_class(lambda state: StepResult(0.5, "x" * 2**20))).play()
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == (Status.TRUNCATED, 0.5, 1)
    assert max([0, *encoded]) < 2**12
