"""Templates whose beginnings are read off one rendering, and those that look ahead."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.core.tokenizers import load_tokenizer
from agentrl.rollout.template import ChatTemplate

OPEN = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
PLAIN = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}" + OPEN
LOOKS_BACK = PLAIN.replace("{{ '<|'", "{% if loop.first and kind != 'system' %}S{% endif %}{{ loop.index0 ~ '<|'")


def marked(template: str) -> ChatTemplate | None:
    tokenizer: Any = load_tokenizer(str(tiny_model_path()))
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer).with_marks()


@pytest.mark.parametrize("template", [PLAIN, "{% set kind = messages[0]['role'] %}" + LOOKS_BACK])
def test_a_template_that_writes_message_after_message_has_marks(template: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found, plain = marked(template), ChatTemplate(load_tokenizer(str(tiny_model_path())))
    assert found is not None
    written = found.render(chat, add_generation_prompt=True)
    assert written.count("\ue002") == 2
    assert written.endswith("\ue003<|assistant|>")
    if template == PLAIN:
        assert written.replace("\ue002", "").replace("\ue003", "") == plain.render(chat, add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("'<|end|>'", "('' if loop.last else '<|end|>')"),
        PLAIN.replace("'<|end|>'", "(messages | length) ~ '<|end|>'"),
        PLAIN.replace("'<|end|>'", "messages[-1]['role']"),
        PLAIN.replace("'<|end|>'", "messages[loop.index0 + 1]['role']"),
        PLAIN.replace("'<|end|>'", "('' if add_generation_prompt else '<|end|>')"),
        PLAIN.replace("in messages", "in messages[1:]"),
        PLAIN.replace("in messages", "in messages if m.role != 'system'"),
        "{% set last = messages[-1] %}" + PLAIN,
        "{% set second = messages[1] %}" + PLAIN,
        "{% set first = messages[false] %}" + PLAIN,
        PLAIN + "{{ messages[0]['role'] }}",
        "{% set ns = namespace(n=0) %}" + PLAIN.replace("{{ '<|'", "{% set ns.n = 1 %}{{ '<|'") + "{{ ns.n }}",
        PLAIN + PLAIN,
        "{{ messages[0]['content'] }}",
    ],
)
def test_a_template_that_looks_ahead_has_none(template: str) -> None:
    assert marked(template) is None
