"""Trained tokens are what a chat template writes for an answer behind its own prompt, byte for byte, for the templates of real families."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.config.tune import DpoConfig, KtoConfig, SftConfig, SftDataConfig, SftMethodConfig
from agentrl.core.errors import ConfigError, DataError
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.encode import Encoder
from agentrl.tune.forms import Chat, Labelled, Pair, dialogue
from agentrl.tune.row_table import Row
from agentrl.tune.row_text import IGNORED
from tests.unit.rollout.families import REFUSED, SOURCES, TOOLS, call, family, said
from tests.unit.tune.plans import encoder_of

NAMES = sorted(name for name in SOURCES if name not in REFUSED)
THOUGHT = {"reasoning_content": "REASON", "reasoning": "REASON", "thinking": "REASON"}
USER = said("user", "What is one plus two?")
CALLS = [call("add", 17)]
ANSWERS = {
    "text": said("assistant", "ANSWER"),
    "thinking": said("assistant", "ANSWER", **THOUGHT),
    "calls": said("assistant", "", tool_calls=CALLS),
    "text and calls": said("assistant", "ANSWER", tool_calls=CALLS),
    "all": said("assistant", "ANSWER", tool_calls=CALLS, **THOUGHT),
}
RESULT = said("tool", "RESULT", tool_call_id="c00000000", name="add")
OPENS_THINKING = {"deepseek_r1_distill", "deepseekv3", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"}
END_OF_DOCUMENT = {"phi3", "phi3_5"}  # they write the end token of a document behind a chat


def rendered(name: str, chat: list[dict[str, Any]], tools: Any, **variables: Any) -> str:
    """What transformers renders, in the first form that the template takes without losing the user's words."""
    for parts in (False, True):
        for text in (False, True):
            form = [_formed(message, parts, text) for message in chat]
            try:
                found = str(family(name).apply_chat_template(form, tools=tools, tokenize=False, **variables))
            except Exception:
                continue
            if "one plus two" in found:
                return found
    return ""


def _formed(message: dict[str, Any], parts: bool, text: bool) -> dict[str, Any]:
    formed = {**message, "content": [{"type": "text", "text": message["content"]}] if parts else message["content"]}
    if text and "tool_calls" in formed:
        functions = [each["function"] for each in formed["tool_calls"]]
        formed["tool_calls"] = [{"function": {**function, "arguments": json.dumps(function["arguments"])}} for function in functions]
    return formed


def expected(name: str, chat: list[dict[str, Any]], tools: Any = None, **variables: Any) -> tuple[str, str] | None:
    """Prompt and answer by transformers; nothing if the template refuses the chat, loses a part of its answer, or writes another prompt."""
    prompt = rendered(name, chat[:-1], tools, add_generation_prompt=True, **variables)
    whole = rendered(name, chat, tools, **variables)
    answer = whole[len(prompt) :]
    wanted = [chat[-1]["content"], *(["add", "17"] if "tool_calls" in chat[-1] else []), *(["REASON"] if "thinking" in chat[-1] else [])]
    return (prompt, answer) if prompt and whole.startswith(prompt) and all(part in answer for part in wanted) else None


def same(name: str, trained: str, answer: str) -> bool:
    """True if an answer is the template's, up to its end or with one where the template writes none."""
    if name in END_OF_DOCUMENT:
        return trained == answer.removesuffix("\n<|im_end|>")
    end = "<|im_end|>" if name != "glm4moe" else "<|observation|>" if "tool_call" in answer else "<|user|>"
    return answer == trained or (answer.startswith(trained) and not answer[len(trained) :].strip()) or trained == answer + end


def encoder(name: str, config: Any = SftConfig, **model: Any) -> tuple[TextCodec, Encoder]:
    codec = TextCodec(family(name))
    return codec, encoder_of(codec, config(model=ModelConfig(**model), data=type(config().data)(max_length=4096)))


def segments(codec: TextCodec, rows: list[Row]) -> list[str]:
    """The text of each run of trained tokens."""
    found: list[list[int]] = []
    for row in rows:
        before = IGNORED
        for label in row["labels"]:
            if label != IGNORED and before == IGNORED:
                found.append([])
            if label != IGNORED:
                found[-1].append(label)
            before = label
    return [codec.decode(ids) for ids in found]


def text_before(codec: TextCodec, row: Row) -> str:
    return codec.decode([token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == IGNORED])


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_each_form_is_the_templates_or_refused_by_its_line(name: str):
    for form, answer in ANSWERS.items():
        tools = TOOLS if "tool_calls" in answer and "Add numbers." in rendered(name, [USER], TOOLS) else None
        chat = Chat(({**USER, "tools": tools} if tools else USER, answer), source="chats.jsonl", where="line 7")
        codec, sft = encoder(name)
        found = expected(name, [USER, answer], tools)
        if found is None:
            with pytest.raises(DataError, match=r"--data = 'chats.jsonl': line 7: .*(chat template|--thinking)"):
                sft.encode([chat])
            continue
        (row,) = sft.encode([chat])
        (trained,) = segments(codec, [row])
        assert same(name, trained, found[1]), form
        assert text_before(codec, row) == found[0], form
        assert sft.ends


@pytest.mark.parametrize("name", NAMES)
def test_pairs_and_labelled_answers_are_the_templates(name: str):
    found = expected(name, [USER, ANSWERS["text"]])
    other = said("assistant", "OTHER")
    codec, dpo = encoder(name, DpoConfig)
    _, kto = encoder(name, KtoConfig)
    if found is None:
        assert name in OPENS_THINKING
        for refusing, example in ((dpo, Pair([USER], ANSWERS["text"], other)), (kto, Labelled([USER], other, True))):
            with pytest.raises(DataError, match="--thinking on or off"):
                refusing.encode([example])
        return
    assert name not in OPENS_THINKING
    (pair,) = dpo.encode([Pair([USER], ANSWERS["text"], other)])
    (labelled,) = kto.encode([Labelled(USER["content"], other, True)])
    assert codec.decode(pair["prompt_ids"]) == found[0] == codec.decode(labelled["prompt_ids"])
    assert same(name, codec.decode(pair["chosen_ids"]), found[1])
    assert same(name, codec.decode(pair["rejected_ids"]), found[1].replace("ANSWER", "OTHER"))
    assert labelled["completion_ids"] == pair["rejected_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_every_turn_of_a_chat_is_trained_behind_the_prompt_that_it_has_in_a_conversation(name: str):
    thought = ANSWERS["thinking"] if expected(name, [USER, ANSWERS["thinking"]]) else ANSWERS["text"]
    chat = [USER, thought, said("user", "And two?"), said("assistant", "SECOND")]
    codec, sft = encoder(name, thinking="on" if name in OPENS_THINKING else "auto")
    rows = sft.encode([Chat(tuple(chat))])
    if name in OPENS_THINKING:
        assert len(segments(codec, rows)) == 2
        return
    prompts = [expected(name, chat[:2]), expected(name, chat)]
    for trained, found in zip(segments(codec, rows), prompts, strict=True):
        assert found is not None
        assert same(name, trained, found[1])
    assert sft.counts.branches == len(rows) - 1
    last = codec.decode(rows[-1]["input_ids"])
    assert prompts[1] is not None
    assert last.startswith(prompts[1][0])


@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3", "qwen2_5_vl"])
def test_tools_that_a_template_does_not_describe_are_described_and_called_as_in_reinforcement_learning(name: str):
    codec, sft = encoder(name)
    system = [] if name == "gemma" else [said("system", "Be brief.")]  # gemma's template takes none
    chat = Chat(
        (
            {**(system or [USER])[0], "tools": TOOLS},
            *system[1:],
            *([USER] if system else []),
            ANSWERS["text and calls"],
            RESULT,
            ANSWERS["text"],
        )
    )
    if name == "gemma":
        with pytest.raises(DataError, match="System role not supported"):
            sft.encode([chat])
        return
    (row,) = sft.encode([chat])
    first, second = segments(codec, [row])
    assert first.startswith('ANSWER\n<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call><|')
    assert second.startswith("ANSWER<|")
    assert "Add numbers." in text_before(codec, row)
    assert "RESULT" in text_before(codec, row)


def only(name: str, chat: list[dict[str, Any]], *, config: Any = SftConfig, **model: Any) -> tuple[str, str]:
    """The prompt and the answer of the only turn that is trained."""
    codec, sft = encoder(name, config, **model)
    (row,) = sft.encode([Chat(tuple(chat))])
    (answer,) = segments(codec, [row])
    return text_before(codec, row), answer


def test_gpt_oss_answers_in_its_final_channel():
    assert only("gptoss", [USER, ANSWERS["text"]])[1] == "<|channel|>final<|message|>ANSWER<|return|>"
    _, answer = only("gptoss", [{**USER, "tools": TOOLS}, ANSWERS["calls"]])
    assert answer == ' to=functions.add<|channel|>commentary json<|message|>{"a": 17}<|call|>'
    thinking = said("assistant", "ANSWER", reasoning_content="REASON")
    assert only("gptoss", [USER, thinking])[1].startswith("<|channel|>analysis<|message|>REASON<|end|><|start|>assistant<|channel|>final")


def test_qwen3_has_its_empty_block_of_thinking_and_leaves_it_out_where_thinking_is_off():
    assert only("qwen3", [USER, ANSWERS["text"]])[1] == "<think>\n\n</think>\n\nANSWER<|im_end|>"
    prompt, answer = only("qwen3", [USER, ANSWERS["text"]], thinking="off")
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert answer == "ANSWER<|im_end|>"
    with pytest.raises(DataError, match="'REASON"):
        only("qwen3", [USER, said("assistant", "ANSWER", reasoning_content="REASON")], thinking="off")


def test_thinking_at_the_beginning_of_the_content_is_thinking():
    block = said("assistant", "<think>\nREASON\n</think>\n\nANSWER")
    field = said("assistant", "ANSWER", reasoning_content="REASON")
    for name in ("qwen3", "qwen3_5_think", "qwen3_8", "gptoss", "glm4moe"):
        assert only(name, [USER, block]) == only(name, [USER, field])
    assert only("qwen2_5", [USER, block])[1] == f"{block['content']}<|im_end|>"  # it knows no thinking, and drops none


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_qwen_has_a_line_break_between_text_and_call(name: str):
    _, answer = only(name, [{**USER, "tools": TOOLS}, ANSWERS["text and calls"]])
    assert answer == 'ANSWER\n<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call><|im_end|>'


def test_a_prompt_that_opens_thinking_is_closed_or_goes_on_as_the_setting_says():
    prompt, answer = only("deepseek_r1_distill", [USER, ANSWERS["text"]], thinking="off")
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert answer.startswith("ANSWER<")
    for thinking in (said("assistant", "ANSWER", reasoning_content="REASON"), said("assistant", "<think>\nREASON\n</think>\n\nANSWER")):
        prompt, answer = only("deepseek_r1_distill", [USER, thinking], thinking="on")
        assert prompt.endswith("<think>\n")
        assert answer.startswith("REASON\n</think>\n\nANSWER<")
        with pytest.raises(DataError, match="thinking of an answer"):
            only("deepseek_r1_distill", [USER, thinking], thinking="off")
    with pytest.raises(ConfigError, match="none of the switches"):
        encoder("qwen2_5", thinking="on")


def test_qwen3_5_ends_the_thinking_that_its_prompt_opens():
    prompt, answer = only("qwen3_5_think", [USER, ANSWERS["text"]])
    assert prompt.endswith("<think>\n")
    assert answer == "\n</think>\n\nANSWER<|im_end|>"


@pytest.mark.parametrize(
    ("name", "chat", "problem"),
    [
        ("phi3", [USER, ANSWERS["text"], RESULT, ANSWERS["text"]], "writes no results of tools"),
        (
            "gptoss",
            [USER, ANSWERS["text"], said("system", "QUICK"), USER, ANSWERS["text"]],
            "leaves out the text of the message of the role",
        ),
        ("llama3_1", [USER, said("assistant", "", tool_calls=[*CALLS, call("sub", 18, 1)]), RESULT, ANSWERS["text"]], "refuses messages"),
        ("llama3", [USER, ANSWERS["calls"], RESULT, ANSWERS["text"]], "writes no tool calls"),
        ("qwen2_5", [USER, ANSWERS["thinking"]], "leaves out the thinking of an answer: 'REASON'"),
    ],
)
def test_a_row_of_which_a_template_would_lose_a_part_is_refused_with_the_part(name: str, chat: list[dict[str, Any]], problem: str):
    _, sft = encoder(name)
    with pytest.raises(DataError, match=f"line 3: the chat template of {name} .*{problem}"):
        sft.encode([Chat(tuple(chat), source="a.jsonl", where="line 3")])


def test_calls_and_results_stay_in_one_row_and_thinking_of_an_earlier_question_begins_another():
    asked = [{**USER, "tools": TOOLS}, ANSWERS["all"], RESULT, said("assistant", "Three.", reasoning_content="It is three.")]
    codec, sft = encoder("qwen3")
    (row,) = sft.encode([Chat(tuple(asked))])
    assert [text.count("<think>") for text in segments(codec, [row])] == [1, 1]
    first, second = sft.encode([Chat((*asked, USER, said("assistant", "Three again.")))])
    assert first == row
    assert segments(codec, [second]) == ["<think>\n\n</think>\n\nThree again.<|im_end|>"]
    assert "REASON" not in text_before(codec, second)
    assert sft.counts.branches == 1


def test_all_tokens_are_trained_once_although_a_chat_has_two_rows():
    chat = Chat((USER, ANSWERS["thinking"], said("user", "And two?"), said("assistant", "SECOND")))
    codec = TextCodec(family("qwen3"))
    first, second = encoder_of(codec, SftConfig(method=SftMethodConfig(train_on="all"))).encode([chat])
    assert first["labels"] == first["input_ids"]
    shared = second["labels"].count(IGNORED)
    assert second["input_ids"][:shared] == first["input_ids"][:shared]
    assert second["labels"][shared:] == second["input_ids"][shared:]


OPENAI = {
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "17?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "17"},
        {"role": "assistant", "content": "It is 17."},
    ],
}


def test_a_row_in_the_form_of_openai_is_the_templates_rendering():
    codec, sft = encoder("qwen3")
    (row,) = sft.encode(dialogue(OPENAI, SftDataConfig()))
    chat: list[Any] = json.loads(json.dumps(OPENAI["messages"]))
    chat[1]["content"], chat[2]["content"] = "What is 17?", ""
    chat[2]["tool_calls"][0]["function"]["arguments"] = {"a": 17}
    whole = family("qwen3").apply_chat_template(chat, tools=TOOLS, tokenize=False)
    assert codec.decode(row["input_ids"]) == whole.removesuffix("\n")
    assert segments(codec, [row]) == [
        '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 17.<|im_end|>",
    ]


def test_a_row_in_the_form_of_sharegpt_is_the_templates_rendering():
    call_text = '<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>'
    values = [("system", "Be brief."), ("human", "What is 17?"), ("gpt", f"<think>\nLook.\n</think>\n\n{call_text}")]
    values += [("tool", "17"), ("gpt", "<think>\nIt is that.\n</think>\n\nIt is 17.")]
    codec, sft = encoder("qwen3")
    row = {"tools": TOOLS, "conversations": [{"from": name, "value": value} for name, value in values]}
    (encoded,) = sft.encode(dialogue(row, SftDataConfig()))
    roles = {"human": "user", "gpt": "assistant"}
    chat = [said(roles.get(name, name), value) for name, value in values]
    assert codec.decode(encoded["input_ids"]) == family("qwen3").apply_chat_template(chat, tools=TOOLS, tokenize=False).removesuffix("\n")
    assert segments(codec, [encoded]) == [f"{values[2][1]}<|im_end|>", f"{values[4][1]}<|im_end|>"]


def test_a_row_of_a_prompt_and_a_completion_with_a_call_is_the_templates_rendering():
    asked = {"role": "user", "content": "What is 17?"}
    answer = said("assistant", "Let me look.", reasoning_content="Look.", tool_calls=[call("add", 17)])
    codec, sft = encoder("qwen3")
    (row,) = sft.encode(dialogue({"tools": TOOLS, "prompt": [asked], "completion": [answer]}, SftDataConfig()))
    whole = family("qwen3").apply_chat_template([asked, answer], tools=TOOLS, tokenize=False)
    assert codec.decode(row["input_ids"]) == whole.removesuffix("\n")
    (trained,) = segments(codec, [row])
    assert trained.startswith("<think>\nLook.\n</think>\n\nLet me look.\n<tool_call>")


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_writes_no_text_is_refused(name: str):
    _, sft = encoder(name)
    with pytest.raises(DataError, match=r"line 3: .*leaves out the text of a user's message.*--chat-template FILE"):
        sft.encode([Chat((USER, ANSWERS["text"]), source="a.jsonl", where="line 3")])


def test_control_tokens_in_messages_stay_text():
    codec, sft = encoder("qwen3")
    (row,) = sft.encode([Chat((said("user", "Say <|im_end|>."), said("assistant", "<|im_end|><|im_start|>")))])
    assert codec.decode(row["input_ids"]).count("<|im_end|>") == 4
    assert row["input_ids"].count(codec.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
