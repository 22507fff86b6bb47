"""Chat templates are rendered as transformers renders them, with the user's settings, and one without an end is ended."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ChatTemplateError, ConfigError
from agentrl.rollout import template
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.template import ChatTemplate
from tests.unit.rollout.families import DIALOGUES, SOURCES, TOOLS, family
from tests.unit.rollout.templates import tokenizer

USER = [{"role": "user", "content": "1+2?"}]


def made_of(source: Any) -> Any:
    made = copy.deepcopy(tokenizer("chatml"))
    made.chat_template = source
    return made


@pytest.mark.parametrize("name", SOURCES)
def test_the_rendering_is_that_of_transformers(name: str) -> None:
    theirs = family(name)
    own = ChatTemplate(theirs)
    for dialogue in DIALOGUES.values():
        for tools in (None, TOOLS):
            for opens in (False, True):
                try:
                    expected = theirs.apply_chat_template(dialogue, tools=tools, tokenize=False, add_generation_prompt=opens)
                except Exception:
                    with pytest.raises(ChatTemplateError, match="refuses messages of the roles"):
                        own.render(dialogue, tools, add_generation_prompt=opens)
                else:
                    assert own.render(dialogue, tools, add_generation_prompt=opens) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_without_an_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "DEADLINE_S", 0.1)
    with pytest.raises(ChatTemplateError, match=r"not ended after 0\.1 seconds.*--chat-template FILE"):
        ChatTemplate(made_of(source)).render(USER)
    assert ChatTemplate(made_of("{{ messages[0].content }}")).render(USER) == "1+2?"


def test_a_template_that_raises_is_named_with_the_roles_and_a_remedy() -> None:
    with pytest.raises(ChatTemplateError, match=r"the chat template of .* refuses messages of the roles user: no!.*--chat-template FILE"):
        ChatTemplate(made_of("{{ raise_exception('no!') }}")).render(USER)
    with pytest.raises(ChatTemplateError, match="roles user"):
        ChatTemplate(made_of("{{ messages[0].content + 1 }}")).render(USER)


def test_a_template_that_is_no_jinja_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model = .*line 1 of its chat template is no valid Jinja"):
        ChatTemplate(made_of("{% if %}"))
    with pytest.raises(ConfigError, match=r"--chat-template = .*cannot be read"):
        ChatTemplate(made_of(""), ModelConfig(chat_template=str(tmp_path / "none.jinja")))


def test_a_file_and_variables_take_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}{{ level }}:{{ messages[0].content }}")
    settings = ModelConfig(chat_template=str(file), chat_template_kwargs=json.dumps({"level": "low"}))
    assert ChatTemplate(tokenizer("chatml"), settings).render(USER) == "<|im_start|>low:1+2?"


def test_a_template_for_tools_is_chosen_by_its_name() -> None:
    several = ChatTemplate(made_of({"default": "plain", "tool_use": "tools"}))
    assert (several.render(USER), several.render(USER, TOOLS)) == ("plain", "tools")
    with pytest.raises(ChatTemplateError, match="none is the default"):
        ChatTemplate(made_of({"rag": "x"})).render(USER)


def test_thinking_is_switched_by_the_templates_own_variable() -> None:
    asked = [{"role": "user", "content": "1+2?"}]
    on, off = (ChatTemplate(family("qwen3"), ModelConfig(thinking=way)).render(asked, add_generation_prompt=True) for way in ("on", "off"))
    assert not on.endswith("</think>\n\n")
    assert off.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match=r"--thinking = 'off': the chat template of .* has none of the switches"):
        ChatTemplate(tokenizer("chatml"), ModelConfig(thinking="off"))


@pytest.mark.parametrize(("text", "problem"), [("{", "is not JSON"), ("[1]", "must be a JSON object")])
def test_variables_must_be_an_object(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--chat-template-kwargs = .*{problem}"):
        ChatTemplate(tokenizer("chatml"), ModelConfig(chat_template_kwargs=text))
