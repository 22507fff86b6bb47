"""Prompts with hints, which the teacher of self-distillation reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.core.errors import ConfigError, RewardError
from agentrl.core.images import PlacedImage
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Status, Task, Trajectory
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import encode_prompt
from agentrl.rollout.hints import Hints, hinted_prompt
from agentrl.rollout.template_files import check_hint_template
from tests.unit.rollout.test_teachers import trajectory, turn

TEMPLATE = "{prompt}\nThe answer is {label}. {hint}"
TASK = Task("What is 3+4?", label=7, id="t", metadata={"hint": "Add {them}."})


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(load_tokenizer(str(tiny_model_path())))


def added(tmp_path: Path, codec: ChatCodec, *trajectories: Trajectory, task: Task = TASK, limit: int = 1000) -> tuple[Trajectory, ...]:
    (tmp_path / "template.txt").write_text(TEMPLATE)
    hints = Hints(str(tmp_path / "template.txt"), apply_chat_template=True)
    return hints.add(task, trajectories, codec, limit)


def test_the_text_of_the_user_is_put_into_the_template() -> None:
    assert hinted_prompt(TEMPLATE, TASK) == "What is 3+4?\nThe answer is 7. Add {them}."
    chat = [{"role": "user", "content": "Hello {x}"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Now"}]
    found = hinted_prompt("{prompt}!", Task(chat))  # type: ignore[arg-type]
    assert [message["content"] for message in found] == ["Hello {x}", "Hi", "Now!"]  # type: ignore[index, union-attr]
    assert chat[2]["content"] == "Now"
    with pytest.raises(RewardError, match=r"names 'hint', and task 't' has prompt, label, other"):
        hinted_prompt(TEMPLATE, Task("x", id="t", metadata={"other": 1}))
    with pytest.raises(RewardError, match="no text of a user"):
        hinted_prompt(TEMPLATE, Task([{"role": "system", "content": "x"}]))


def test_each_context_that_begins_with_the_prompt_gets_its_hint(tmp_path: Path, codec: ChatCodec) -> None:
    plain = encode_prompt(codec, TASK.prompt, apply_chat_template=True)
    hinted = encode_prompt(codec, hinted_prompt(TEMPLATE, TASK), apply_chat_template=True)
    turns = (turn(plain, [5]), turn([6], [7]), turn([*plain, 9], [8], fresh=True), turn([3, 4], [9], fresh=True))
    frozen = trajectory(turn([1], [2]), frozen=True)
    found, same = added(tmp_path, codec, trajectory(*turns), frozen)
    ids = [None if each.hinted_ids is None else each.hinted_ids.tolist() for each in found.turns]
    assert ids == [hinted, None, [*hinted, 9], None]
    assert [each.prompt_ids.tolist() for each in found.turns] == [plain, [6], [*plain, 9], [3, 4]]
    assert same is frozen
    assert added(tmp_path, codec, frozen) == (frozen,)


def test_an_episode_that_cannot_have_its_hint_has_failed(tmp_path: Path, codec: ChatCodec) -> None:
    plain = encode_prompt(codec, TASK.prompt, apply_chat_template=True)
    hinted = encode_prompt(codec, hinted_prompt(TEMPLATE, TASK), apply_chat_template=True)
    image: Any = PlacedImage.__new__(PlacedImage)
    long = f"has {len(hinted) + 1} tokens with its hint, and the model reads {len(hinted)}"
    for changes, said in (
        ({"first": turn([1, 2], [3])}, "does not begin with the prompt of its task"),
        ({"first": turn(plain, [3], images=(image,))}, "reads text only"),
        (
            {"first": turn(plain, [3]), "limit": len(hinted)},
            long,
        ),
        ({"first": turn(plain, [3]), "task": Task(TASK.prompt)}, "names 'hint'"),
    ):
        first = changes.pop("first")
        (found,) = added(tmp_path, codec, trajectory(first), **changes)
        assert (found.status, found.reward) == (Status.ENV_ERROR, None)
        assert said in str(found.error)
    (found,) = added(tmp_path, codec, trajectory(turn(plain, [3])), limit=len(hinted) + 1)
    assert found.status is Status.FINISHED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("The answer is {label}.", "places label, and needs {prompt}"),
        ("no place", "places none"),
        ("{prompt} {label.__class__}", "has the places prompt, label.__class__"),
        ("{prompt} {", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_template_of_another_form_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "template.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--teacher-template.*{problem}"):
        check_hint_template(str(file))
    file.write_text("{{x}} {prompt}")
    assert check_hint_template(str(file)).format(prompt="p") == "{x} p"
