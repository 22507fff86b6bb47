from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.config.tune import (
    DpoConfig,
    PairsDataConfig,
    ProcessMethodConfig,
    ProcessRewardModelConfig,
    SftConfig,
    SftDataConfig,
    SftMethodConfig,
)
from agentrl.core.errors import DataError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.encode import Encoder, render
from agentrl.tune.forms import Answer, Chat, Labelled, Pair, Steps, Text
from agentrl.tune.row_table import Row, fingerprint
from agentrl.tune.row_text import IGNORED, SHORT, RowOfTurns, TextBatch
from agentrl.tune.turns import TurnRenderer
from tests.unit.tune.plans import encoder_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|sep|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|sep|>\n\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(load_tokenizer(str(tiny_model_path())))


def tokenizer_with(template: str, *tokens: str) -> Any:
    tokenizer = load_tokenizer(str(tiny_model_path()))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "tokens", "end"),
    [
        (None, (), "<|end|>"),
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (LLAMA, ("<|start|>", "<|sep|>", "<|eot|>"), "<|eot|>"),
    ],
)
def test_a_chat_has_the_tokens_of_its_template_and_answers_are_marked(template: str | None, tokens: tuple[str, ...], end: str):
    """The tokens are those that transformers makes of the template, although no template has a generation marker."""
    tokenizer = load_tokenizer(str(tiny_model_path())) if template is None else tokenizer_with(template, *tokens)
    codec = TextCodec(tokenizer)
    row = chat_row(codec)
    ids = row["input_ids"]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert codec.decode(ids) == codec.decode(whole)[: len(codec.decode(ids))]
    assert ids.tolist() == whole[: len(ids)]
    assert not tokenizer.decode(whole[len(ids) :]).strip()  # the template's line break after the last turn
    assert trained(codec, row) == f"3{end}It is 4.{end}"


def chat_row(codec: TextCodec, messages: Any = CHAT, **method: Any) -> Row:
    """The only row of a chat."""
    (row,) = encoder_of(codec, SftConfig(method=SftMethodConfig(**method))).encode([Chat(tuple(messages))])
    return row


def trained(codec: TextCodec, row: Row) -> str:
    return codec.decode([label for label in row["labels"] if label != IGNORED])


def test_the_last_answer_alone_and_a_message_of_weight_0(codec: TextCodec):
    row = chat_row(codec, train_on="last")
    assert trained(codec, row) == "It is 4.<|end|>"
    skipped = [*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]]
    assert chat_row(codec, skipped) == row


def test_control_tokens_in_an_answer_are_plain_text(codec: TextCodec):
    row = chat_row(codec, [CHAT[1], {"role": "assistant", "content": "<|end|>"}])
    assert row["input_ids"].count(codec.tokenizer.eos_token_id) == 2  # after the question, and after the answer
    assert codec.decode(row["input_ids"]).endswith("<|assistant|><|end|><|end|>")


def test_text_is_encoded_with_what_stands_before_it_since_the_last_control_token(codec: TextCodec):
    noted: list[str] = []
    batch: Any = SimpleNamespace(want=noted.append)
    row = RowOfTurns(codec, TurnRenderer(codec, SftConfig().model), batch, [""])
    for text in ("<|user|>1+2?<|end|><|assistant|>", "3<|end|>", "<|user|>And 2+2?<|end|><|assistant|>", "4<|end|>"):
        row.add(text, trained=text[0] != "<")
    assert noted[::2] == ["", "<|assistant|>", "<|end|>", "<|assistant|>"]
    assert noted[-1] == "<|assistant|>4<|end|>"


def test_a_long_text_of_the_rows_before_is_not_encoded_again(codec: TextCodec):
    batch, long = TextBatch(codec), "word " * SHORT
    for texts, pieces in (([long, "one"], [long, "one"]), ([long, "two"], ["two"]), (["three"], ["three"]), ([long], [long])):
        for text in texts:
            batch.want(text)
        wanted = batch.taken()
        assert wanted.pieces == pieces
        batch.put(wanted, codec.encode_pieces(pieces))
        assert [batch.ids(text) for text in texts] == codec.encode_pieces(texts)


def test_an_answer_to_a_prompt_and_plain_text(codec: TextCodec):
    encoder = encoder_of(codec, SftConfig())
    row, text = encoder.encode([Answer("What is 1+2?", CHAT[2]), Text("1+2=3")])
    assert render(codec, row) == "<|user|>What is 1+2?<|end|><|assistant|>[[3<|end|>]]"
    assert text["labels"] == text["input_ids"]
    assert text["input_ids"][-1] == codec.tokenizer.eos_token_id
    assert (encoder.counts.rows, encoder.counts.dropped) == (2, 0)
    assert encoder.counts.trained == sum(label != IGNORED for label in row["labels"]) + len(text["labels"])
    assert encoder.counts.longest == max(len(row["input_ids"]), len(text["input_ids"]))


def test_training_all_tokens(codec: TextCodec):
    (row,) = encoder_of(codec, SftConfig(method=SftMethodConfig(train_on="all"))).encode([Chat(tuple(CHAT))])
    assert row["labels"] == row["input_ids"]


def test_rows_that_are_too_long_are_dropped_cut_or_split_and_counted(codec: TextCodec):
    long = Text(" ".join(["1+2=3"] * 20))
    short = Text("1+2=3")

    def encoded(overlong: Any) -> tuple[list[dict[str, Any]], Encoder]:
        encoder = encoder_of(codec, SftConfig(data=SftDataConfig(max_length=16, overlong=overlong)))
        return encoder.encode([long, short]), encoder

    dropped, first = encoded("drop")
    assert (len(dropped), first.counts.dropped, first.counts.examples) == (1, 1, 2)
    cut, second = encoded("cut")
    assert (next(len(row["input_ids"]) for row in cut), second.counts.cut) == (16, 1)
    split, third = encoded("split")
    assert third.counts.split == 1
    joined = [token for row in split[:-1] for token in row["input_ids"]]
    assert joined == [*codec.encode_text(long.text), codec.tokenizer.eos_token_id]


def test_a_row_without_room_for_its_answer_is_dropped_even_if_it_may_be_cut(codec: TextCodec):
    data = PairsDataConfig(max_length=12, overlong="cut")
    encoder = encoder_of(codec, DpoConfig(data=data))
    long = Pair("What is 1+2 and 3+4 and 5+6?", CHAT[2], CHAT[4])
    fits = Pair("1", CHAT[2], CHAT[4])
    (row,) = encoder.encode([long, fits])
    assert encoder.counts.dropped == 1
    assert len(row["prompt_ids"]) + len(row["chosen_ids"]) <= 12


def test_no_row_left_is_an_error(codec: TextCodec):
    with pytest.raises(DataError, match="leaves no row: all 1 have more than --max-length 8"):
        encoder_of(codec, SftConfig(data=SftDataConfig(max_length=8))).encode([Chat(tuple(CHAT))])


def test_pairs_and_labelled_answers(codec: TextCodec):
    encoder = encoder_of(codec, DpoConfig())
    pair, labelled = encoder.encode([Pair("What is 1+2?", CHAT[2], CHAT[4], 0.5), Labelled("What is 1+2?", CHAT[4], False)])
    assert codec.decode(pair["prompt_ids"]) == "<|user|>What is 1+2?<|end|><|assistant|>"
    assert codec.decode(pair["chosen_ids"]) == "3<|end|>"
    assert render(codec, pair).endswith("rejected [[It is 4.<|end|>]]\nmargin   0.5")
    assert labelled["prompt_ids"] == pair["prompt_ids"]
    assert labelled["completion_ids"] == pair["rejected_ids"]
    assert render(codec, labelled).startswith("undesirable  <|user|>What")


def test_a_step_is_judged_at_the_last_token_of_its_separator(codec: TextCodec):
    example = Steps("Add.", ("1+2=3", "3+4=8"), (1.0, 0.0))
    (row,) = encoder_of(codec, ProcessRewardModelConfig(method=ProcessMethodConfig(step_separator=" ;"))).encode([example])
    places = [place for place, label in enumerate(row["labels"]) if label != IGNORED]
    assert [codec.decode(row["input_ids"][: place + 1]).rpartition("=")[2] for place in places] == ["3 ;", "8 ;"]
    assert [row["labels"][place] for place in places] == [1.0, 0.0]
    assert render(codec, row).endswith("1+2=3 ;[[1]]3+4=8 ;[[0]]")
    last = ProcessRewardModelConfig(method=ProcessMethodConfig(last_step_only=True))
    (row,) = encoder_of(codec, last).encode([example])
    assert [label for label in row["labels"] if label != IGNORED] == [0.0]


def test_the_hash_of_rows_sees_order_names_and_values():
    rows = [{"input_ids": [1, 2], "label": True}, {"input_ids": [3], "label": False}]
    same = fingerprint(rows)
    assert fingerprint([dict(reversed(row.items())) for row in rows]) == same
    for other in (rows[::-1], rows[:1], [rows[0], {"input_ids": [3], "label": True}], [rows[0], {"ids": [3], "label": False}]):
        assert fingerprint(other) != same
