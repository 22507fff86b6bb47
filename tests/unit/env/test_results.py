"""What a user may return, and what is refused with file, method and value named."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import ResetResult, SamplingParams, StepResult
from agentrl.core.errors import EnvResultError
from agentrl.env.results import MAX_TEXT, RawText, check_reset, check_step, said

WHERE = "calc.py: Calc.step"


def refused(value: Any) -> str:
    with pytest.raises(EnvResultError) as caught:
        check_step(value, WHERE)
    assert str(caught.value).startswith(WHERE)
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.ones(1), np.array(1.0), [1.0], (1,), torch.tensor(1.0), torch.ones(1), torch.ones(1, 1)],
)
def test_a_reward_may_be_anything_that_is_one_number(value: Any) -> None:
    assert check_step({"rewards": value}, WHERE).reward == 1.0
    result = check_step(StepResult(value, terminated=True), WHERE)
    assert result.reward == 1.0
    assert type(result.reward) is float


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, None, "1.0", [1, 2], [], np.ones(2), torch.ones(3), np.array("x"), {}, 10**400, 1j, [[1.0]], object()],
)
def test_a_reward_that_is_not_one_finite_number_is_refused(value: Any) -> None:
    assert "rewards" in refused({"rewards": value})
    assert "reward" in refused(StepResult(value, terminated=True))


def test_the_dictionary_form() -> None:
    result = check_step(
        {
            "rewards": torch.tensor(0.5),
            "scores": 0.25,
            "environment_feedback": "<|end|>again",
            "done": np.bool_(False),
            "sampling_params": SamplingParams(temperature=0.5, top_k=-1, stop=["\n"], max_tokens=7, seed=None),
            "extra_logs": {"turns": torch.tensor(2)},
            "environment_images": ["a.png"],
        },
        WHERE,
    )
    assert isinstance(result.observation, RawText)
    assert result.observation == "<|end|>again"
    assert (result.reward, result.score, result.terminated) == (0.5, 0.25, False)
    assert result.sampling == {"temperature": 0.5, "top_k": 0, "stop": ("\n",), "max_tokens": 7}
    assert (dict(result.info), result.images) == ({"turns": 2.0}, ("a.png",))


def test_the_least_a_dictionary_needs_is_its_reward() -> None:
    result = check_step({"rewards": 1}, WHERE)
    assert (result.observation, result.score, result.terminated, dict(result.info)) == ("", None, False, {})
    assert "'rewards' is missing" in refused({"done": True})


def test_text_becomes_one_user_message_and_messages_stay() -> None:
    assert check_step(StepResult(0, "more"), WHERE).observation == ({"role": "user", "content": "more"},)
    message = {"role": "tool", "content": "56"}
    assert check_step(StepResult(0, [message]), WHERE).observation == (message,)  # type: ignore[list-item]


@pytest.mark.parametrize("observation", [5, [], ["text"], [{"role": "user"}], [{"role": "", "content": "x"}], [{"content": "x"}], {}])
def test_an_observation_that_is_no_message_is_refused(observation: Any) -> None:
    assert "observation" in refused(StepResult(0, observation))


def test_a_step_that_neither_ends_nor_answers_is_refused() -> None:
    assert "terminated=True" in refused(StepResult(1.0))
    assert check_step(StepResult(1.0, truncated=True), WHERE).observation is None


def test_a_misspelt_key_is_answered_with_the_nearest_one() -> None:
    assert "unknown key 'reward'; did you mean 'rewards'?" in refused({"reward": 1})
    assert "did you mean 'max_tokens'?" in refused({"rewards": 1, "sampling_params": {"max_token": 5}})


def test_the_two_forms_of_a_result_are_told_apart() -> None:
    told = refused({"reward": 1, "done": True})
    assert "unknown key 'reward'; did you mean 'rewards'? In the typed form write: return StepResult(reward=..., terminated=...)" in told
    assert "unknown key 'truncated', as only a StepResult has it. In the typed form" in refused({"rewards": 1, "truncated": True})


@pytest.mark.parametrize(
    ("name", "meant"), [("done", "did you mean terminated?"), ("scor", "did you mean score?"), ("zzz", "there are reward,")]
)
def test_a_field_that_a_result_does_not_have_is_answered(name: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        StepResult(1.0, **{name: True})
    assert meant in said(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scores": "high"}, "scores"),
        ({"scores": float("nan")}, "scores"),
        ({"done": "yes"}, "done"),
        ({"done": 2}, "done"),
        ({"extra_logs": {"x": math.nan}}, "extra_logs['x']"),
        ({"extra_logs": {"x": "text"}}, "extra_logs['x']"),
        ({"extra_logs": [1]}, "extra_logs"),
        ({"extra_logs": {"a\nb": 1}}, "a key of extra_logs"),
        ({"extra_logs": {"\ud800": 1}}, "a key of extra_logs"),
        ({"extra_logs": {"x" * 201: 1}}, "a key of extra_logs"),
        ({"environment_feedback": 5}, "environment_feedback"),
        ({"environment_feedback": b"x"}, "environment_feedback"),
        ({"environment_feedback": "x" * (MAX_TEXT + 1)}, "environment_feedback"),
        ({"environment_images": "a.png"}, "images"),
        ({"environment_images": np.zeros((2, 2, 3))}, "images"),
        ({"sampling_params": {"temperature": 0}}, "sampling['temperature']"),
        ({"sampling_params": {"temperature": 0.001}}, "sampling['temperature']"),
        ({"sampling_params": {"temperature": 2.1}}, "sampling['temperature']"),
        ({"sampling_params": {"seed": 2**63}}, "sampling['seed']"),
        ({"sampling_params": {"top_k": 2**31}}, "sampling['top_k']"),
        ({"sampling_params": {"top_p": 1.5}}, "sampling['top_p']"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling['max_tokens']"),
        ({"sampling_params": {"max_tokens": 1.5}}, "sampling['max_tokens']"),
        ({"sampling_params": {"stop": [""]}}, "sampling['stop']"),
        ({"sampling_params": {"stop_token_ids": ["a"]}}, "sampling['stop_token_ids']"),
        ({"sampling_params": 5}, "sampling"),
    ],
)
def test_other_fields_are_checked_too(change: dict[str, Any], field: str) -> None:
    assert f"returned {field} = " in refused({"rewards": 1, **change})


def test_a_seed_is_kept_to_its_last_digit() -> None:
    seed = 2**63 - 1
    assert check_step(StepResult(1.0, terminated=True, sampling={"seed": seed}), WHERE).sampling == {"seed": seed}


def test_a_long_value_is_shown_shortened() -> None:
    assert len(refused({"rewards": "x" * 10_000})) < 400
    assert len(refused(StepResult(0, [{"role": "user", "content": "y" * (MAX_TEXT + 1)}]))) < 600


def test_a_score_a_rounding_error_above_one_is_one() -> None:
    assert check_step(StepResult(1.0, terminated=True, score=1.0000001), WHERE).score == 1.0


@pytest.mark.parametrize("value", [None, 1.0, (1.0, "obs", True), "done", SimpleNamespace(reward=1)])
def test_a_result_of_another_type_is_refused(value: Any) -> None:
    assert "return a StepResult" in refused(value)


def test_an_object_whose_repr_fails_does_not_hide_the_error() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Hostile" in refused(Hostile())


PROMPT = "What is 1+1?"


def test_reset_may_leave_the_prompt_as_it_is() -> None:
    for value in (None, ResetResult(), ResetResult(PROMPT), {"observation": PROMPT}, {}):
        assert check_reset(value, WHERE, PROMPT).observation is None
    chat = [{"role": "user", "content": PROMPT}]
    assert check_reset({"observation": [dict(chat[0])]}, WHERE, chat).observation is None  # type: ignore[arg-type]


def test_reset_may_replace_the_prompt() -> None:
    assert check_reset(ResetResult("Other"), WHERE, PROMPT).observation == ({"role": "user", "content": "Other"},)
    raw = check_reset({"observation": "<s>Other"}, WHERE, PROMPT).observation
    assert isinstance(raw, RawText)
    assert raw == "<s>Other"


@pytest.mark.parametrize("value", ["text", 5, {"observaton": "x"}, {"observation": 5}, ResetResult("x", info={"a": math.inf})])
def test_a_bad_reset_is_refused(value: Any) -> None:
    with pytest.raises(EnvResultError):
        check_reset(value, WHERE, PROMPT)


@pytest.mark.parametrize(
    ("field", "value", "checked"),
    [
        ("score", 1, 1.0),
        ("info", {"a": 1}, {"a": 1.0}),
        ("sampling", {"temperature": 0.5}, {"temperature": 0.5}),
        ("reward_parts", {"a": 1}, {"a": 1.0}),
        ("state_key", 3, "3"),
        ("step_rewards", [[2, 1]], ((2, 1.0),)),
    ],
)
def test_each_field_of_a_step_is_kept(field: str, value: Any, checked: Any) -> None:
    plain = check_step(StepResult(1, "go on", truncated=True), "E.step")
    assert (plain.reward, plain.terminated, plain.truncated, plain.info) == (1.0, False, True, {})
    assert getattr(check_step(StepResult(1, "go on", **{field: value}), "E.step"), field) == checked
