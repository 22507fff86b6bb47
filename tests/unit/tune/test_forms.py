from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.tune import DialogueDataConfig, LabelledDataConfig, PairsDataConfig, RewardDataConfig, SftDataConfig, StepsDataConfig
from agentrl.tune.columns import RowError
from agentrl.tune.forms import Answer, Chat, Labelled, Pair, Steps, Text, dialogue, labelled, pair, steps

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))


def test_a_dialogue_is_recognised_by_its_columns():
    data = DialogueDataConfig()
    assert dialogue({"messages": [USER, GOOD]}, data) == [Chat((USER, GOOD))]
    assert dialogue({"prompt": "2+2?", "completion": "4"}, data) == [Answer("2+2?", GOOD)]
    assert dialogue({"text": "2+2=4"}, data) == [Text("2+2=4")]


def test_the_share_gpt_form_is_read():
    row = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    assert dialogue(row, DialogueDataConfig()) == [Chat((USER, GOOD))]


def test_content_of_text_parts_becomes_text_and_arguments_of_calls_objects():
    parts = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    (chat,) = dialogue({"messages": [parts, {"role": "assistant", "content": None, "tool_calls": [call]}]}, DialogueDataConfig())
    assert isinstance(chat, Chat)
    assert chat.messages[0] == USER
    assert chat.messages[1]["content"] == ""
    assert chat.messages[1]["tool_calls"] == [{**call, "function": {"name": "add", "arguments": {"a": 2}}}]
    (both,) = pair({"prompt": [parts], "chosen": [parts, GOOD], "rejected": [parts, BAD]}, PairsDataConfig())
    assert both == Pair([USER], GOOD, BAD)


def test_tools_go_into_the_first_message():
    tool = {"type": "function", "function": {"name": "add"}}
    (chat,) = dialogue({"messages": [USER, GOOD], "tools": f"[{tool}]".replace("'", '"')}, DialogueDataConfig())
    assert isinstance(chat, Chat)
    assert chat.messages[0]["tools"] == [tool]


def test_quality_is_written_into_the_last_message_of_the_user():
    data = SftDataConfig(quality_key="reward", quality_template="{prompt} <{quality:.1f}>")
    (chat,) = dialogue({"messages": [USER, GOOD, USER, BAD], "reward": 0.25}, data)
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == ["2+2?", "4", "2+2? <0.2>", "5"]
    (answer,) = dialogue({"prompt": "2+2?", "completion": "4", "reward": 1}, data)
    assert isinstance(answer, Answer)
    assert answer.prompt == "2+2? <1.0>"


def test_pairs_with_a_prompt_without_one_and_with_one_that_is_repeated():
    data = PairsDataConfig()
    as_text = Pair("2+2?", GOOD, BAD)
    assert pair({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, data) == [as_text]
    as_chat = Pair([USER], GOOD, BAD)
    assert pair({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, data) == [as_chat]
    assert pair({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, data) == [as_chat]
    assert pair({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, data) == [as_chat]


def test_a_margin_is_read_where_it_is_asked_for():
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "gap": 2}
    assert pair(row, RewardDataConfig(margin_key="gap"))[0].margin == 2.0  # type: ignore[union-attr]
    assert pair(row, RewardDataConfig())[0].margin is None  # type: ignore[union-attr]


def test_labelled_answers_and_pairs_that_count_as_two():
    data = LabelledDataConfig()
    assert labelled({"prompt": "2+2?", "completion": "4", "label": True}, data) == [Labelled("2+2?", GOOD, True)]
    both = labelled({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, data)
    assert both == [Labelled("2+2?", GOOD, True), Labelled("2+2?", BAD, False)]


def test_labels_of_steps_become_probabilities():
    row = {"prompt": "2+2?", "completions": ["2+2", "=4"], "labels": [True, 0.25]}
    assert steps(row, StepsDataConfig()) == [Steps("2+2?", ("2+2", "=4"), (1.0, 0.25))]


BAD_DIALOGUES = [
    ({}, "is missing"),
    ({"messages": "hello"}, "is no list of messages"),
    ({"messages": []}, "is no list of messages"),
    ({"messages": [GOOD]}, "begins with a message of the assistant"),
    ({"messages": [USER]}, "ends with a message of user"),
    ({"messages": [USER, GOOD, BAD]}, "two messages of the assistant in a row"),
    ({"messages": [{"role": "user"}, GOOD]}, "whose content is no text"),
    ({"messages": [USER, {"content": "4"}]}, "no message with role and content at place 1"),
    ({"prompt": "", "completion": "4"}, "empty text"),
    ({"completion": "4"}, "'prompt' is missing"),
    ({"prompt": [USER, GOOD], "completion": "4"}, "ends with a message of the assistant"),
    ({"text": 5}, "is no text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, GOOD]},
        "images that cannot be used: number 0 is no image",
    ),
    ({"messages": [USER, {**GOOD, "reasoning_content": ["why"]}]}, "whose reasoning_content is no text, at place 1"),
    ({"messages": [USER, {**GOOD, "function_call": {"name": "add"}}]}, "with function_call at place 1"),
    ({"messages": [USER, {**GOOD, "tool_calls": [{"id": "c1"}]}]}, "a tool call without the name of a function, at place 1"),
    ({"messages": [USER, {**GOOD, "tool_calls": [{"name": "add", "arguments": "{"}]}]}, "a call of add whose arguments are not JSON"),
    ({"messages": [USER, {**GOOD, "tool_calls": [{"name": "add", "arguments": "[1]"}]}]}, "a call of add whose arguments are no object"),
    ({"messages": [USER, GOOD], "tools": {"name": "add"}}, "'tools' is no list of JSON schemas"),
    ({"messages": [USER, GOOD], "tools": "[{"}, "'tools' is not JSON"),
]


@pytest.mark.parametrize(("row", "message"), BAD_DIALOGUES)
def test_a_bad_dialogue_is_named_by_its_column(row: dict[str, Any], message: str):
    with pytest.raises(RowError, match=message):
        dialogue(row, DialogueDataConfig())


BAD_PAIRS = [
    ({"prompt": "a", "chosen": "b"}, "'rejected' is missing"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'rejected' is the same as column 'chosen'"),
    ({"chosen": "b", "rejected": "c"}, "'prompt' is missing"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "does not begin as column 'chosen'"),
    ({"prompt": [USER], "chosen": [GOOD, USER, BAD], "rejected": [BAD]}, "holds messages of assistant, user, assistant"),
]


@pytest.mark.parametrize(("row", "message"), BAD_PAIRS)
def test_a_bad_pair_is_named_by_its_column(row: dict[str, Any], message: str):
    with pytest.raises(RowError, match=message):
        pair(row, PairsDataConfig())


def test_bad_margins_labels_and_steps_are_named():
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "gap": "much"}
    with pytest.raises(RowError, match="'gap' is no number"):
        pair(row, RewardDataConfig(margin_key="gap"))
    with pytest.raises(RowError, match="'label' is neither true nor false"):
        labelled({"prompt": "a", "completion": "b", "label": "yes"}, LabelledDataConfig())
    with pytest.raises(RowError, match="'labels' is no list of 2 labels"):
        steps({"prompt": "a", "completions": ["b", "c"], "labels": [1]}, StepsDataConfig())
    with pytest.raises(RowError, match="'labels' holds 2"):
        steps({"prompt": "a", "completions": ["b"], "labels": [2]}, StepsDataConfig())
    with pytest.raises(RowError, match="'completions' is no list of texts"):
        steps({"prompt": "a", "completions": "b", "labels": [1]}, StepsDataConfig())


def test_a_column_with_a_similar_name_is_proposed():
    with pytest.raises(RowError) as caught:
        pair({"prompt": "a", "choosen": "b", "rejected": "c"}, PairsDataConfig())
    assert caught.value.remedy == "Did you mean choosen?"
