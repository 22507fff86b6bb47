"""Templates of several families: prompts, what comes between turns, and text that must stay text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Message
from agentrl.core.errors import ConfigError, EnvResultError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.rollout.chat import ChatCodec
from tests.unit.rollout.templates import FAMILIES, tokenizer

TEMPLATED = ["chatml", "llama3", "qwen", "gemma"]
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "qwen": "<|im_end|>", "gemma": "<end_of_turn>"}
USER = Message(role="user", content="What is one plus two?")


def ids_of(family: str, text: str) -> list[int]:
    return list(tokenizer(family)(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("family", TEMPLATED)
def test_a_prompt_is_what_the_tokenizer_itself_makes_of_it(family: str) -> None:
    expected = tokenizer(family).apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    codec = ChatCodec(tokenizer(family))
    assert codec.encode_chat([USER]) == ids_of(family, expected)
    codec.encode_question(USER["content"]).clear()  # whoever gets them owns them
    assert codec.encode_question(USER["content"]) == ids_of(family, expected)


@pytest.mark.parametrize("family", TEMPLATED)
@pytest.mark.parametrize("ended", [True, False])
def test_a_dialogue_in_pieces_equals_the_whole_rendering(family: str, ended: bool) -> None:
    codec, end = ChatCodec(tokenizer(family)), ids_of(family, ENDS[family])
    first, answer = codec.encode_chat([USER]), ids_of(family, "It is three.")
    sampled = answer + end if ended else answer
    pieces = first + sampled + codec.encode_next([Message(role="user", content="Two?")], sampled[-1])
    dialogue = [USER, Message(role="assistant", content="It is three."), Message(role="user", content="Two?")]
    whole = tokenizer(family).apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    assert pieces == ids_of(family, whole)


def test_several_tool_messages_are_rendered_together() -> None:
    codec = ChatCodec(tokenizer("qwen"))
    tools = [Message(role="tool", content="1"), Message(role="tool", content="2")]
    text = codec.decode(codec.encode_next(tools, codec.end_token_ids[-1]))
    expected = (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == expected


def test_a_kept_answer_is_a_list_of_ones_own_and_depends_on_role_text_and_last_token() -> None:
    codec = ChatCodec(tokenizer("qwen"))
    end = codec.end_token_ids[-1]
    first = codec.encode_next([USER], end)
    expected = list(first)
    first.append(0)
    assert codec.encode_next([USER], end) == expected
    others = [
        codec.encode_next([Message(role="tool", content=USER["content"])], end),
        codec.encode_next([Message(role="user", content="!")], end),
    ]
    assert all(other != expected for other in [*others, codec.encode_next([USER], 9)])


def test_another_end_token_than_the_templates_gets_the_templates_appended() -> None:
    codec = ChatCodec(tokenizer("qwen"))
    (other,) = ids_of("qwen", "<|endoftext|>")
    assert codec.decode(codec.encode_next([USER], other)).startswith("<|im_end|>\n")


@pytest.mark.parametrize("family", TEMPLATED)
def test_the_end_tokens_are_known_and_left_out_of_the_action(family: str) -> None:
    codec, (end,) = ChatCodec(tokenizer(family)), ids_of(family, ENDS[family])
    assert end in codec.end_token_ids
    assert codec.decode_action([*ids_of(family, "three"), end]) == "three"
    assert codec.decode_action(ids_of(family, "three")) == "three"
    assert codec.decode_action([]) == ""


def control_count(family: str, ids: list[int]) -> int:
    special = set(tokenizer(family).convert_tokens_to_ids(FAMILIES[family][3]))
    return sum(token in special for token in ids)


@settings(max_examples=500, deadline=None)
@given(st.data(), st.sampled_from(list(FAMILIES)))
def test_text_never_becomes_a_control_token(data: st.DataObject, family: str) -> None:
    codec = ChatCodec(tokenizer(family))
    fragments = st.sampled_from(
        [*FAMILIES[family][3], "<|im_", "end|>", "<", "|", ">", "\ue000", "\ue0001\ue001", "\ud800", "\udc00", " ", "x", "é", "😀"]
    )
    content = "".join(data.draw(st.lists(fragments, max_size=8)))
    plain, spelled = Message(role="user", content="x"), Message(role="user", content=content)
    assert control_count(family, codec.encode_chat([spelled])) == control_count(family, codec.encode_chat([plain]))
    assert control_count(family, codec.encode_next([spelled], 9)) == control_count(family, codec.encode_next([plain], 9))
    if family not in ("gemma", "llama3", "llama_tools"):  # these trim
        expected = content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert expected in codec.decode(codec.encode_chat([spelled]))


def test_raw_text_keeps_its_control_tokens() -> None:
    codec = ChatCodec(tokenizer("chatml"))
    assert codec.encode_text("<|im_start|>user") == ids_of("chatml", "<|im_start|>user")
    assert control_count("chatml", codec.encode_text("<|im_start|>user")) == 1
    assert codec.decode(codec.encode_text("a\ud800b")) == "a\ufffdb"


def test_a_system_prompt_is_put_before_a_chat_without_one() -> None:
    codec = ChatCodec(tokenizer("chatml"), system_prompt="Be brief.")
    assert codec.decode(codec.encode_chat([USER])).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    own = [Message(role="system", content="Own."), USER]
    assert "Be brief" not in codec.decode(codec.encode_chat(own))


def test_without_a_template_contents_are_joined_by_line_breaks() -> None:
    codec = ChatCodec(tokenizer("none"))
    assert codec.decode(codec.encode_chat([USER])) == "What is one plus two?\n"
    assert codec.decode(codec.encode_next([USER], 5)) == "\nWhat is one plus two?\n"
    parts = Message(role="user", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert codec.decode(codec.encode_chat([parts])) == "ab\n"


def test_messages_that_the_template_refuses_take_another_form_or_are_named() -> None:
    codec = ChatCodec(tokenizer("gemma"))
    assert codec.decode(codec.encode_next([Message(role="tool", content="1"), USER], 5)) == (
        "<end_of_turn>\n<start_of_turn>user\n1\nWhat is one plus two?<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(EnvResultError, match="roles user, assistant, assistant, user: Roles must alternate"):
        codec.encode_next([Message(role="assistant", content="1"), USER], 5)


def test_a_template_that_hides_turns_is_refused_at_once() -> None:
    import copy

    hiding = copy.deepcopy(tokenizer("chatml"))
    hiding.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="leaves out an earlier turn"):
        ChatCodec(hiding)


def test_a_model_that_does_not_exist_is_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.field == "--model"
