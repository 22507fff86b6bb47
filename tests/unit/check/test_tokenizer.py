"""The tokenizer without transformers gives what transformers gives."""

from __future__ import annotations

import pytest

from agentrl.assets import tiny_model_path
from agentrl.check.tokenizer import FileTokenizer
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Message
from agentrl.rollout.chat import ChatCodec

CHAT = [Message(role="system", content="Be <|end|> brief."), Message(role="user", content="What is 3+4? \u00e9\u4e16")]


@pytest.fixture(scope="module")
def codecs() -> tuple[ChatCodec, ChatCodec]:
    path = tiny_model_path()
    return ChatCodec(FileTokenizer(path)), ChatCodec(load_tokenizer(str(path)))


def test_chats_and_answers(codecs: tuple[ChatCodec, ChatCodec]) -> None:
    ours, theirs = codecs
    assert ours.end_token_ids == theirs.end_token_ids
    assert ours.encode_chat(CHAT) == theirs.encode_chat(CHAT)
    assert ours.encode_next(CHAT[1:], 1) == theirs.encode_next(CHAT[1:], 1)
    ids = theirs.encode_text("<|user|>raw text<|end|>")
    assert ours.encode_text("<|user|>raw text<|end|>") == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_it_is_used_where_it_can_be() -> None:
    assert FileTokenizer.can_read(tiny_model_path())
    assert not FileTokenizer.can_read(tiny_model_path().parent)
