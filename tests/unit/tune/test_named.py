"""Forms in which data sets are published: one row of each, as their authors or TRL prepare it."""

from __future__ import annotations

import csv
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl.data_utils import (
    extract_prompt,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    unpair_preference_dataset,
)

from agentrl.config.methods import METHODS
from agentrl.core.errors import DataError
from agentrl.core.types import Message
from agentrl.resolve.tune import load_given
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.data import Examples
from agentrl.tune.forms import Answer, Chat, Labelled, Pair, Steps, Text
from agentrl.tune.prepare import make_tokenizer
from tests.unit.tune.plans import examples_of, num_trained, rows_of

KINDS = {"dialogue": "sft", "pairs": "dpo", "labelled": "kto", "steps": "process-reward-model"}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
HH = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: What is 1+1?\n\nAssistant: {}"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def read(path: Path, kind: str, **settings: Any) -> Examples:
    method = METHODS[KINDS[kind]]
    return examples_of(load_given(method, {"data": str(path), **settings}).settings, method.form)


def read_row(tmp_path: Path, kind: str, *rows: Any, **settings: Any) -> Examples:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read(path, kind, **settings)


TURNS = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
WRONG = [CHAT[0], {"role": "assistant", "content": "3"}]
RATED = [{"response": "3", "overall_score": 2.0}, {"response": "2", "overall_score": 8.5}, {"response": "two", "overall_score": 8.0}]
SHEPHERD = "Janet has 3 eggs. How many are 2 boxes? Step 1: 3 * 2 = 6 ки\nStep 2: The answer is: 7 ки"
PRM = {
    "question": {"problem": "1+1?", "ground_truth_answer": "2"},
    "label": {
        "steps": [
            {
                "completions": [{"text": "Add.", "rating": 1}, {"text": "Guess.", "rating": -1}],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {"completions": [{"text": "It is 3.", "rating": -1}], "human_completion": {"text": "It is 2."}, "chosen_completion": None},
        ]
    },
}
ALPACA = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
FORMS: list[tuple[str, str, Any, list[Any]]] = [
    ("alpaca", "dialogue", ALPACA, [Answer("Add.\n1 and 1", said("2"))]),
    ("alpaca", "dialogue", {**ALPACA, "input": "", "text": "### Instruction: Add. ### Response: 2"}, [Answer("Add.", said("2"))]),
    (
        "alpaca",
        "dialogue",
        {**ALPACA, "system": "Be brief.", "history": [["Hello", "Hi."]]},
        [Chat((Message(role="system", content="Be brief."), user("Hello"), said("Hi."), user("Add.\n1 and 1"), said("2")))],
    ),
    (
        "alpaca",
        "pairs",
        {"instruction": "Add.", "input": "1 and 1", "chosen": "2", "rejected": "3"},
        [Pair("Add.\n1 and 1", said("2"), said("3"))],
    ),
    ("alpaca", "labelled", {**ALPACA, "kto_tag": False}, [Labelled("Add.\n1 and 1", said("2"), False)]),
    ("sharegpt", "dialogue", {"conversations": TURNS}, [Chat((user("1+1?"), said("2")))]),
    (
        "sharegpt",
        "dialogue",
        {
            "system": "Be brief.",
            "tools": json.dumps([TOOL]),
            "conversations": [
                TURNS[0],
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "3"},
                TURNS[1],
            ],
        },
        [
            Chat(
                (
                    {"role": "system", "content": "Be brief.", "tools": [TOOL]},  # type: ignore[typeddict-unknown-key, arg-type]
                    user("1+1?"),
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},  # type: ignore[typeddict-unknown-key]
                    Message(role="tool", content="3"),
                    said("2"),
                )
            )
        ],
    ),
    (
        "sharegpt",
        "pairs",
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "3"}},
        [Pair([user("1+1?")], said("2"), said("3"))],
    ),
    ("sharegpt", "labelled", {"conversations": TURNS, "kto_tag": True}, [Labelled([user("1+1?")], said("2"), True)]),
    ("chat", "dialogue", {"messages": CHAT}, [Chat((user("1+1?"), said("2")))]),
    (
        "chat",
        "dialogue",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}, CHAT[1]]},
        [Chat((user("1+1?"), said("2")))],
    ),
    ("text", "dialogue", {"text": "1+1=2"}, [Text("1+1=2")]),
    ("prompt and completion", "dialogue", {"prompt": "1+1?", "completion": "2"}, [Answer("1+1?", said("2"))]),
    ("prompt and completion", "dialogue", {"prompt": CHAT[:1], "completion": CHAT[1:]}, [Answer([user("1+1?")], said("2"))]),
    ("prompt and response", "dialogue", {"prompt": "1+1?", "response": "2"}, [Answer("1+1?", said("2"))]),
    ("prompt and response", "labelled", {"prompt": "1+1?", "response": "2", "label": 1}, [Labelled("1+1?", said("2"), True)]),
    ("ultrafeedback", "dialogue", {"instruction": "1+1?", "completions": RATED}, [Answer("1+1?", said("2"))]),
    ("ultrafeedback", "pairs", {"instruction": "1+1?", "completions": RATED}, [Pair("1+1?", said("2"), said("3"))]),
    ("ultrafeedback of H4", "pairs", {"prompt": "1+1?", "chosen": CHAT, "rejected": WRONG}, [Pair([user("1+1?")], said("2"), said("3"))]),
    ("chosen and rejected", "pairs", {"prompt": "1+1?", "chosen": "2", "rejected": "3"}, [Pair("1+1?", said("2"), said("3"))]),
    ("chosen and rejected", "pairs", {"chosen": CHAT, "rejected": WRONG}, [Pair([user("1+1?")], said("2"), said("3"))]),
    (
        "helpsteer preferences",
        "pairs",
        {"prompt": "1+1?", "response_1": "3", "response_2": "2", "preference_strength": 3},
        [Pair("1+1?", said("2"), said("3"))],
    ),
    (
        "helpsteer3 preferences",
        "pairs",
        {"context": CHAT[:1], "response1": "2", "response2": "3", "overall_preference": -2, "individual_preference": []},
        [Pair([user("1+1?")], said("2"), said("3"))],
    ),
    (
        "pku-saferlhf",
        "pairs",
        {"prompt": "1+1?", "response_0": "3", "response_1": "2", "better_response_id": 1, "safer_response_id": 0},
        [Pair("1+1?", said("2"), said("3"))],
    ),
    ("shp", "pairs", {"history": "1+1?", "human_ref_A": "2", "human_ref_B": "3", "labels": 1}, [Pair("1+1?", said("2"), said("3"))]),
    ("shp", "pairs", {"history": "1+1?", "human_ref_A": "3", "human_ref_B": "2", "labels": 0}, [Pair("1+1?", said("2"), said("3"))]),
    (
        "orca pairs",
        "pairs",
        {"system": "Be brief.", "question": "1+1?", "chosen": "2", "rejected": "3"},
        [Pair([Message(role="system", content="Be brief."), user("1+1?")], said("2"), said("3"))],
    ),
    ("dolly", "dialogue", {"instruction": "Add.", "context": "1 and 1", "response": "2"}, [Answer("Add.\n1 and 1", said("2"))]),
    (
        "question and response",
        "dialogue",
        {"system_prompt": "Be brief.", "question": "1+1?", "response": "2"},
        [Answer([Message(role="system", content="Be brief."), user("1+1?")], said("2"))],
    ),
    ("question and answer", "dialogue", {"question": "1+1?", "answer": "It is #### 2"}, [Answer("1+1?", said("It is #### 2"))]),
    ("query and response", "dialogue", {"query": "1+1?", "response": "2"}, [Answer("1+1?", said("2"))]),
    ("problem and solution", "dialogue", {"problem": "1+1?", "solution": "2", "answer": "2"}, [Answer("1+1?", said("2"))]),
    (
        "hh-rlhf",
        "pairs",
        {"chosen": HH.format("2"), "rejected": HH.format("3")},
        [Pair([user("Hello"), said("Hi."), user("What is 1+1?")], said("2"), said("3"))],
    ),
    (
        "labelled answers",
        "labelled",
        {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
        [Labelled([user("1+1?")], said("2"), True)],
    ),
    ("labelled chat", "labelled", {"messages": CHAT, "label": False}, [Labelled([user("1+1?")], said("2"), False)]),
    (
        "prm800k",
        "steps",
        PRM,
        [
            Steps("1+1?", ("Guess.",), (0.0,)),
            Steps("1+1?", ("Add.", "It is 3."), (1.0, 0.0)),
            Steps("1+1?", ("Add.", "It is 2."), (1.0, 1.0)),
        ],
    ),
    (
        "math-shepherd",
        "steps",
        {"input": SHEPHERD, "label": SHEPHERD.replace("6 ки", "6 +").replace("7 ки", "7 -"), "task": "GSM8K"},
        [Steps("Janet has 3 eggs. How many are 2 boxes?", ("Step 1: 3 * 2 = 6", "Step 2: The answer is: 7"), (1.0, 0.0))],
    ),
    (
        "steps",
        "steps",
        {"prompt": "1+1?", "completions": ["Add.", "It is 2."], "labels": [True, True]},
        [Steps("1+1?", ("Add.", "It is 2."), (1.0, 1.0))],
    ),
]


@pytest.mark.parametrize(
    ("name", "kind", "row", "expected"), FORMS, ids=[f"{name}, {kind} {index}" for index, (name, kind, *_) in enumerate(FORMS)]
)
def test_a_row_of_each_form(name: str, kind: str, row: Any, expected: list[Any], tmp_path: Path) -> None:
    found = read_row(tmp_path, kind, row)
    assert found.parts == (tuple(expected),)
    assert f"1 row of the form {name}" in found.notes[0]


def test_ratings_of_a_prompt_make_a_pair_and_equal_ones_make_none(tmp_path: Path) -> None:
    rows = [("1+1?", "3", 1), ("1+1?", "2", 4), ("1+1?", "two", 3), ("2+2?", "4", 3), ("2+2?", "four", 3), ("3+3?", "6", 4)]
    found = read_row(tmp_path, "pairs", *({"prompt": a, "response": b, "helpfulness": c, "verbosity": 1} for a, b, c in rows))
    assert found.parts == ((Pair("1+1?", said("2"), said("3")),),)


def test_chats_are_read_as_trl_reads_them(tmp_path: Path) -> None:
    turns = [{"from": "user", "value": "1+1?"}, {"from": "assistant", "value": "2"}]
    theirs = maybe_convert_to_chatml({"conversations": deepcopy(turns)})["messages"]
    (chat,) = read_row(tmp_path, "dialogue", {"conversations": turns}).parts[0]
    assert isinstance(chat, Chat)
    assert [dict(message) for message in chat.messages] == theirs
    split = extract_prompt({"chosen": CHAT, "rejected": WRONG})
    (pair,) = read_row(tmp_path, "pairs", {"prompt": "1+1?", "chosen": CHAT, "rejected": WRONG}).parts[0]
    assert isinstance(pair, Pair)
    assert (pair.prompt, [pair.chosen], [pair.rejected]) == (split["prompt"], split["chosen"], split["rejected"])


TRL_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"messages": CHAT}),
    ("sft", {"prompt": CHAT[:1], "completion": CHAT[1:]}),
    ("sft", {"messages": [*CHAT, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}),
    ("dpo", {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": WRONG[1:]}),
    ("dpo", {"chosen": CHAT, "rejected": WRONG}),
    ("kto", {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True}),
]


@pytest.mark.parametrize(("command", "row"), TRL_ROWS, ids=[f"{command}: {', '.join(row)}" for command, row in TRL_ROWS])
def test_rows_have_the_text_of_trls_preparation(command: str, row: dict[str, Any], tmp_path: Path) -> None:
    """TRL extracts the prompt and renders; what follows are the tokens of its texts."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    plan = load_given(METHODS[command], {"data": str(path)})
    tokenizer = make_tokenizer(plan.settings.model, "")
    codec = TextCodec(tokenizer)
    (found,) = rows_of(plan).parts[0]
    theirs = maybe_apply_chat_template(maybe_extract_prompt(deepcopy(row)), tokenizer)
    if command == "sft":
        assert codec.decode(found["input_ids"]) == theirs.get("text", theirs.get("prompt", "") + theirs.get("completion", ""))
        return
    assert codec.decode(found["prompt_ids"]) == theirs["prompt"]
    for name in {"chosen", "rejected", "completion"} & theirs.keys():
        assert codec.decode(found[f"{name}_ids"]) == theirs[name]


def test_a_pair_counts_as_two_labelled_answers_as_in_trl(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}]
    theirs = unpair_preference_dataset(Dataset.from_list(rows))
    found = read_row(tmp_path, "labelled", *rows).parts[0]
    assert [(row["prompt"], row["completion"], row["label"]) for row in theirs] == [
        (each.prompt, each.answer["content"], each.label) for each in found if isinstance(each, Labelled)
    ]


def test_lists_in_parquet_and_tools_beside_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list([{"messages": CHAT, "tools": json.dumps([TOOL])}]).to_parquet(path)
    (chat,) = read(path, "dialogue").parts[0]
    assert isinstance(chat, Chat)
    assert chat.messages[0]["tools"] == [TOOL]
    assert [message["content"] for message in chat.messages] == ["1+1?", "2"]


def test_columns_that_are_named_are_taken(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "output": "2", "question": "1+1?"}
    found = read_row(tmp_path, "dialogue", row, prompt_key="question", completion_key="output")
    assert found.parts == ((Answer("1+1?", said("2")),),)
    text = {**ALPACA, "text": "1+1=2"}
    assert read_row(tmp_path, "dialogue", text, form="text").parts == ((Text("1+1=2"),),)


def test_arrays_marks_of_byte_order_and_json_in_cells(tmp_path: Path) -> None:
    array = tmp_path / "array.json"
    array.write_text("\ufeff" + json.dumps([{"messages": CHAT}, {"messages": CHAT}], indent=1), encoding="utf-8")
    assert read(array, "dialogue").parts == ((Chat((user("1+1?"), said("2"))),) * 2,)
    table = tmp_path / "table.csv"
    with table.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("prompt", "completion", "label"), (json.dumps(CHAT[:1]), "[2]", "False")])
    assert read(table, "labelled").parts == ((Labelled([user("1+1?")], said("[2]"), False),),)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("prompt", "completions", "labels"), ("1+1?", '["Add.", "2"]', "[true, 0.5]")])
    assert read(table, "steps").parts == ((Steps("1+1?", ("Add.", "2"), (1.0, 0.5)),),)


def test_bad_rows_stop_or_are_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{number}+1?", "completion": "2"}) for number in range(10_000)]
    lines[41] = '{"prompt": "1'
    lines[77] = json.dumps({"prompt": "1+1?", "completion": ""})
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 42 is not JSON"):
        read(path, "dialogue")
    found = read(path, "dialogue", bad_rows="skip")
    assert (num_trained(found), len(found.held_out)) == (9899, 99)
    notes = "\n".join(found.notes)
    assert "2 rows skipped" in notes
    assert "line 42 is not JSON" in notes
    assert "line 78: column 'completion' is an empty text" in notes
    with pytest.raises(DataError, match=r"2 rows that cannot be used, more than --max-bad-rows allows\. line 42"):
        read(path, "dialogue", bad_rows="skip", max_bad_rows=0.0001)


def test_copies_and_labels_that_are_all_the_same_are_told(tmp_path: Path) -> None:
    notes = read_row(tmp_path, "labelled", *[{"prompt": "1+1?", "completion": "2", "label": True}] * 3).notes
    assert any("2 examples that stood there before" in note for note in notes)
    assert any("all answers are desirable" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "row", "match"),
    [
        ("steps", {"input": "No steps.", "label": "No steps."}, "has no . or - at the end of each step"),
        (
            "steps",
            {"question": {"problem": "1+1?"}, "label": {"steps": [{"chosen_completion": 3}]}},
            "is not of the form prm800k: IndexError",
        ),
        (
            "pairs",
            {"instruction": "1+1?", "completions": [{"response": "2"}]},
            "is not of the form ultrafeedback: KeyError: 'overall_score'",
        ),
        ("pairs", {"prompt": "2+2?", "chosen": CHAT, "rejected": WRONG}, "is not what the chats of column 'chosen' ask"),
        ("dialogue", {**ALPACA, "history": "none"}, "is no list of pairs of a question and its answer"),
        (
            "dialogue",
            {"conversations": [TURNS[0], {"from": "function_call", "value": "{"}, TURNS[1]]},
            "a function_call that is not JSON, at place 1",
        ),
        ("dialogue", {**ALPACA, "output": ""}, "column 'completion' is an empty text, made of the form alpaca"),
        ("labelled", {"messages": CHAT[:1], "label": True}, "is no chat that ends with an answer"),
    ],
)
def test_a_row_that_breaks_its_form_is_named(kind: str, row: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{match}"):
        read_row(tmp_path, kind, row)
