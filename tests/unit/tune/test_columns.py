"""Columns and keys that mean the same in every form, and those that no form reads, which are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.tune import DialogueDataConfig, LabelledDataConfig, PairsDataConfig
from agentrl.core.errors import DataError
from agentrl.core.types import Message
from agentrl.tune.columns import Columns, RowError, opened
from agentrl.tune.forms import Answer, Chat, Labelled, Pair, dialogue, labelled, pair
from tests.unit.tune.plans import num_trained
from tests.unit.tune.test_named import CHAT, FORMS, RATED, TOOL, TURNS, read_row, said, user

SYSTEM = Message(role="system", content="Be brief.")


@pytest.mark.parametrize(("name", "kind", "row", "expected"), FORMS, ids=[f"{form[0]}, {form[1]} {at}" for at, form in enumerate(FORMS)])
def test_an_unknown_column_is_named_in_every_form(name: str, kind: str, row: Any, expected: list[Any], tmp_path: Path) -> None:
    found = read_row(tmp_path, kind, {**row, "surprise": "x", "nothing": None, "empty": ""})
    assert found.parts == (tuple(expected),)
    (line,) = [note for note in found.notes if "columns that are not read" in note]
    names = line.rpartition(": ")[2].split(", ")
    assert "surprise" in names
    assert not {"nothing", "empty"} & set(names)


def test_columns_of_ratings_that_are_joined_are_named_too(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "response": str(n), "helpfulness": n, "verbosity": 1} for n in (1, 2)]
    assert any("not read: verbosity" in note for note in read_row(tmp_path, "pairs", *rows).notes)


def test_a_column_that_is_read_is_not_named(tmp_path: Path) -> None:
    row = {"query": "a", "response": "b", "system": "Be brief.", "history": [["c", "d"]], "tools": [TOOL]}
    assert not any("not read" in note for note in read_row(tmp_path, "dialogue", row).notes)
    both = {"messages": CHAT, "prompt": "a", "completion": "b"}
    assert any("not read: prompt, completion" in note for note in read_row(tmp_path, "dialogue", both).notes)
    # A form that makes a column of the same name has not read that of the row.
    alpaca = {"instruction": "Add.", "output": "2", "prompt": "Below is an instruction"}
    assert any("not read: prompt" in note for note in read_row(tmp_path, "dialogue", alpaca).notes)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("dialogue", {"messages": [{**CHAT[0], "mood": "calm"}, CHAT[1]]}),
        ("dialogue", {"conversations": [{**TURNS[0], "mood": "calm"}, TURNS[1]]}),
        ("dialogue", {"prompt": CHAT[:1], "completion": [{**CHAT[1], "mood": "calm"}]}),
        ("pairs", {"prompt": [{**CHAT[0], "mood": "calm"}], "chosen": "2", "rejected": "3"}),
        ("pairs", {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "3", "mood": "calm"}]}),
        ("labelled", {"messages": [CHAT[0], {**CHAT[1], "mood": "calm"}], "label": True}),
        ("steps", {"prompt": [{**CHAT[0], "mood": "calm"}], "completions": ["2"], "labels": [1]}),
    ],
)
def test_an_unknown_key_of_a_message_is_named(kind: str, row: Any, tmp_path: Path) -> None:
    assert any("keys of messages that only a chat template may read: mood" in note for note in read_row(tmp_path, kind, row).notes)


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("dialogue", {"messages": CHAT}),
    ("dialogue", {"conversations": TURNS}),
    ("dialogue", {"conversation": [{"human": "1+1?", "assistant": "2"}]}),
    ("dialogue", {"prompt": "1+1?", "completion": "2"}),
    ("dialogue", {"prompt": CHAT[:1], "completion": CHAT[1:]}),
    ("dialogue", {"prompt": "1+1?", "response": "2"}),
    ("dialogue", {"instruction": "1+1?", "output": "2"}),
    ("dialogue", {"query": "1+1?", "response": "2"}),
    ("dialogue", {"question": "1+1?", "answer": "2"}),
    ("dialogue", {"problem": "1+1?", "solution": "2"}),
    ("dialogue", {"instruction": "1+1?", "completions": RATED}),
    ("pairs", {"prompt": "1+1?", "chosen": "2", "rejected": "3"}),
    ("pairs", {"prompt": CHAT[:1], "chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "3"}]}),
    ("pairs", {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "3"}]}),
    ("pairs", {"prompt": "1+1?", "chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "3"}]}),
    ("pairs", {"question": "1+1?", "chosen": "2", "rejected": "3"}),
    ("pairs", {"instruction": "1+1?", "chosen": "2", "rejected": "3"}),
    ("pairs", {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "3"}}),
    ("pairs", {"chosen_messages": CHAT, "rejected_messages": [CHAT[0], {"role": "assistant", "content": "3"}]}),
    ("pairs", {"messages": CHAT, "rejected_messages": [CHAT[0], {"role": "assistant", "content": "3"}]}),
    ("pairs", {"messages": CHAT, "rejected_response": "3"}),
    ("pairs", {"query": "1+1?", "response": "2", "rejected_response": "3"}),
    ("labelled", {"prompt": "1+1?", "completion": "2", "label": True}),
    ("labelled", {"messages": CHAT, "label": True}),
    ("labelled", {"instruction": "1+1?", "output": "2", "kto_tag": True}),
    ("labelled", {"conversations": TURNS, "kto_tag": True}),
]
IDS = [f"{kind}: {', '.join(row)}" for kind, row in ASKED]


def messages_of(example: Any) -> list[Any]:
    """The whole chat of an example, with its good answer."""
    if isinstance(example, Chat):
        return list(example.messages)
    prompt = [user(example.prompt)] if isinstance(example.prompt, str) else list(example.prompt)
    return [*prompt, example.chosen if isinstance(example, Pair) else example.answer]


@pytest.mark.parametrize(("kind", "row"), ASKED, ids=IDS)
def test_system_message_history_and_tools_are_read_in_every_form(kind: str, row: dict[str, Any], tmp_path: Path) -> None:
    shared = {"system": "Be brief.", "history": [["Hello", "Hi."]], "tools": json.dumps([TOOL])}
    (example,) = read_row(tmp_path, kind, {**row, **shared}).parts[0]
    assert messages_of(example) == [{**SYSTEM, "tools": [TOOL]}, user("Hello"), said("Hi."), user("1+1?"), said("2")]
    # LLaMA-Factory and ms-swift learn the answers of the history in supervised training, and only there.
    assert isinstance(example, Chat) == (kind == "dialogue")


@pytest.mark.parametrize(("kind", "row"), ASKED, ids=IDS)
def test_images_are_read_and_other_media_refused_in_every_form(kind: str, row: dict[str, Any], tmp_path: Path) -> None:
    (example,) = read_row(tmp_path, kind, {**row, "images": ["picture.png"]}).parts[0]
    assert example.images == ("picture.png",)
    assert messages_of(example)[0]["content"] == [{"type": "image"}, {"type": "text", "text": "1+1?"}]
    assert read_row(tmp_path, kind, {**row, "images": "picture.png"}).parts[0][0].images == ("picture.png",)  # type: ignore[union-attr]
    for name in ("videos", "audios", "video", "audio"):
        with pytest.raises(DataError, match=rf"line 1: column '{name}' holds .*clip.*models here are trained on text and images"):
            read_row(tmp_path, kind, {**row, name: ["clip"]})


ANSWERS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bad"}, {"role": "user", "content": "b"},
           {"role": "assistant", "content": "good"}]  # fmt: skip
MARKS = [("weight", 0), ("loss_weight", 0.0), ("loss", False), ("training", False), ("train", False), ("loss_scale", 0.0)]


@pytest.mark.parametrize(("mark", "value"), MARKS)
def test_answers_that_are_marked_are_not_trained_in_either_form_of_messages(mark: str, value: Any) -> None:
    weights = [None, 0, None, None]
    marked = [{**message, mark: value} if weight == 0 else message for message, weight in zip(ANSWERS, weights, strict=True)]
    marked[3] = {**marked[3], mark: True}
    names = {"user": "human", "assistant": "gpt"}
    shared = [
        {"from": names[message["role"]], "value": message["content"], **{key: message[key] for key in (mark,) if key in message}}
        for message in marked
    ]
    for row in ({"messages": marked}, {"conversations": shared}):
        (chat,) = dialogue(row, DialogueDataConfig())
        assert isinstance(chat, Chat)
        assert chat.messages == (ANSWERS[0], {**ANSWERS[1], "weight": 0}, *ANSWERS[2:])


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": [ANSWERS[0], {**ANSWERS[1], "weight": 0.5}]}, "a message whose weight is 0.5, at place 1"),
        ({"messages": [{**ANSWERS[0], "loss": True}, ANSWERS[1]]}, r"a message of user that is marked to be trained \(loss\), at place 0"),
        ({"messages": [ANSWERS[0], {**ANSWERS[1], "loss": False}]}, "no answer to train: all are marked not to be"),
        ({"prompt": "a", "completion": [{**ANSWERS[1], "weight": 0}]}, "an answer that is marked not to be trained"),
        ({"messages": CHAT, "history": "Hello"}, "'history' is no list of pairs"),
        ({"messages": CHAT, "system": ["Be brief."]}, "'system' is no text"),
        ({"messages": [SYSTEM, *CHAT], "system": "Be long."}, "'system' is given, and the chat begins with a system message"),
        ({"prompt": "a", "completion": "b", "tools": "[{"}, "'tools' is not JSON"),
    ],
)
def test_marks_and_shared_columns_that_cannot_be_meant_are_refused(row: dict[str, Any], match: str) -> None:
    with pytest.raises(RowError, match=match):
        dialogue(row, DialogueDataConfig())


def test_marked_answers_of_pairs_and_labels_are_refused() -> None:
    marked = [{**ANSWERS[1], "loss": False}]
    with pytest.raises(RowError, match="column 'rejected' holds an answer that is marked"):
        pair({"prompt": "a", "chosen": "b", "rejected": marked}, PairsDataConfig())
    with pytest.raises(RowError, match="column 'completion' holds an answer that is marked"):
        labelled({"prompt": "a", "completion": marked, "label": True}, LabelledDataConfig())


def test_a_column_that_a_setting_names_has_no_other_meaning() -> None:
    row = {"history": "Hello", "completion": "Hi."}
    assert dialogue(row, DialogueDataConfig(prompt_key="history")) == [Answer("Hello", said("Hi."))]


def test_a_system_message_twice_is_one_and_history_may_be_messages() -> None:
    row = {"messages": [SYSTEM, *CHAT], "system_prompt": "Be brief.", "history": [user("Hello"), said("Hi.")]}
    (chat,) = dialogue(row, DialogueDataConfig())
    assert isinstance(chat, Chat)
    assert list(chat.messages) == [SYSTEM, user("Hello"), said("Hi."), *CHAT]


def test_parts_with_a_value_are_read() -> None:
    parts = [{"type": "image", "value": "a.png"}, {"type": "text", "value": "1+1?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "value": "2"}]}
    assert dialogue({"messages": [{"role": "user", "content": parts[1:]}, answer]}, DialogueDataConfig()) == [Chat(tuple(CHAT))]  # type: ignore[arg-type]
    (chat,) = dialogue({"messages": [{"role": "user", "content": parts}, answer]}, DialogueDataConfig())
    assert isinstance(chat, Chat)
    assert chat.images == ("a.png",)
    assert chat.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "1+1?"}]


def test_an_empty_answer_says_how_to_skip_it(tmp_path: Path) -> None:
    empty = {"messages": [CHAT[0], {"role": "assistant", "content": ""}]}
    with pytest.raises(DataError, match=r"an empty message of assistant at place 1\. .*--bad-rows skip"):
        read_row(tmp_path, "dialogue", empty)
    with pytest.raises(DataError, match="--bad-rows skip"):
        read_row(tmp_path, "labelled", {"prompt": "a", "completion": "b", "label": "perhaps"})
    found = read_row(tmp_path, "dialogue", *[{"messages": CHAT}] * 9, empty, bad_rows="skip")
    assert num_trained(found) == 9


def test_turns_of_a_conversation_have_no_other_keys(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'conversation' is no list of objects with human and assistant"):
        read_row(tmp_path, "dialogue", {"conversation": [{"human": "1+1?", "assistant": "2", "system": "Be brief."}]})


def test_a_labelled_row_keeps_what_its_prompt_shares(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3", "system": "Be brief."}
    both = read_row(tmp_path, "labelled", row).parts[0]
    assert both == (Labelled([SYSTEM, user("1+1?")], said("2"), True), Labelled([SYSTEM, user("1+1?")], said("3"), False))


def test_a_cell_with_a_zero_is_not_empty() -> None:
    assert Columns({"rank": 0, "flag": False, "none": None, "text": "", "list": []}).unread() == {"rank": 0, "flag": False}


def test_turns_before_a_chat_follow_its_system_message_in_every_form() -> None:
    system, question = {"from": "system", "value": "S"}, {"from": "human", "value": "Q"}
    pair = [["q", "a"]]
    before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert opened([system, question], {"history": pair}, DialogueDataConfig()) == [system, *before, question]


def test_a_column_that_a_setting_names_is_no_system_message() -> None:
    assert opened("hello", {"system": "hello"}, DialogueDataConfig(prompt_key="system")) == "hello"
    assert opened("hello", {"system": "S"}, DialogueDataConfig())[0] == {"role": "system", "content": "S"}
