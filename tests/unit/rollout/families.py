"""The chat templates of real model families, as installed packages carry them, and dialogues to render with them."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.forms import Dialect
from tests.unit.rollout.templates import tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": SCHEMA}}]
_CONTROL = re.compile(
    r"<\|[\w:/ ]+\|>|<\uff5c[^\uff5c\s]+\uff5c>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|</?s>|<end_of_utterance>"
    r"|<\|?/?(?:turn|tool_call|tool_response|channel)\|?>|<\|\"\|>"
)


def _sources() -> dict[str, str]:
    found = {}
    for package, pattern in (("trl", "chat_templates/*.jinja"), ("vllm", "**/*.jinja")):
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec is not None else ():
            files = [file for file in sorted(Path(root).glob(pattern)) if not file.stem.endswith("_training")]
            found |= {file.stem: file.read_text(encoding="utf-8") for file in files}
    return found


SOURCES = _sources()
"""Templates by name."""


@lru_cache
def family(name: str) -> Any:
    """A small tokenizer with a family's template, whose control tokens are those that the template spells."""
    if name not in SOURCES:
        pytest.skip(f"the template {name} belongs to a package that is not installed")
    made = copy.deepcopy(tokenizer("chatml"))
    made.add_special_tokens({"additional_special_tokens": sorted(set(_CONTROL.findall(SOURCES[name])))})
    made.chat_template = SOURCES[name]
    made.name_or_path = name
    return made


def call(name: str, number: int, place: int = 0) -> dict[str, Any]:
    return {"type": "function", "id": f"c0000000{place}", "function": {"name": name, "arguments": {"a": number}}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED = said("user", "What is one plus two?")
SYSTEM = said("system", "Be brief.")
RESULTS = [said("tool", f"RESULT-{place}", name=("add", "sub")[place], tool_call_id=f"c0000000{place}") for place in range(2)]
CALLED = said("assistant", "", tool_calls=[call("add", 17)])
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "plain": [ASKED],
    "system": [SYSTEM, ASKED],
    "several turns": [ASKED, said("assistant", "Three."), said("user", "Two?"), said("assistant", "Four."), said("user", "Five?")],
    "call and result": [ASKED, CALLED, RESULTS[0]],
    "two results out of order": [ASKED, said("assistant", "", tool_calls=[call("add", 17), call("sub", 18, 1)]), RESULTS[1], RESULTS[0]],
    "text and call": [ASKED, said("assistant", "Let me look.", tool_calls=[call("add", 17)]), RESULTS[0]],
    "reasoning": [ASKED, said("assistant", "Three.", reasoning_content="One, two."), said("user", "Two?")],
    "system in the middle": [ASKED, said("assistant", "Three."), said("system", "Be quick."), said("user", "Two?")],
    "list content": [said("user", [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}])],
    "tool description": [SYSTEM, ASKED],
}

REFUSED = ("template_kimi_audio",)
"""Templates that write no text of a user, only sound."""


@lru_cache
def codec_of(name: str) -> ChatCodec:
    return ChatCodec(family(name))


def own_renderings(name: str, dialogue: str, messages: Any = None) -> list[str]:
    """What transformers makes of a dialogue with results in the order of their calls, in each form of content and arguments."""
    found = []
    reasoning = codec_of(name)._dialect.reasoning
    tools = TOOLS if dialogue == "tool description" else None
    for parts, json_arguments, no_content in product((False, True), repeat=3):
        form = Dialect(parts=parts, json_arguments=json_arguments, no_content=no_content, reasoning=reasoning)
        chat = form.finished(form.normal(messages or DIALOGUES[dialogue]))
        with suppress(Exception):
            found.append(family(name).apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True))
    return found


NO_CALLS = ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")
NO_CALLS += ("template_basic", "template_blip2", "template_chatml", "template_deepseek_ocr", "template_deepseek_vl2")
"""Templates that leave out calls, which become text: JSON in tags."""
NO_RESULTS = ("cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5", "template_blip2", "template_deepseek_ocr")
NO_RESULTS += ("template_deepseek_vl2",)
"""Templates that leave out or refuse results of tools, which become messages of the user."""
TOOLS_TOLD = ("gptoss", "llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "template_minicpmv45")
"""Templates that describe tools in a form of call that needs no parser; for others the system message does."""
PARSERS = {
    **dict.fromkeys(("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "gemma4"),
    "glm4moe": "glm45",
    **dict.fromkeys(("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"), "lfm2"),
    "muse_glimmer": "muse_glimmer",
    **dict.fromkeys(("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), "qwen3_coder"),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), "qwen3_coder"),
}
"""Parsers of vLLM that read the calls which templates with a form of their own write."""
NO_LATER_SYSTEM = (
    "cohere",
    "gemma",
    "gemma3",
    "gptoss",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
    "qwen3_vl",
    "template_blip2",
    "template_deepseek_ocr",
    "template_deepseek_vl2",
)
"""Templates that leave out or refuse a system message behind others, which becomes the user's."""
MOVED_SYSTEM = ("cohere2", "deepseek_r1_distill", "deepseekv3")
"""Templates that put a later system message at the beginning, where nothing can be appended; behind a turn it is the user's."""
NO_SYSTEM = ("gemma", "template_blip2")
"""Templates that refuse or leave out even a first system message, which becomes the user's."""
ONE_CALL = ("gptoss", "llama3_1", "llama3_2")
"""Templates that write one call of a message, so that further ones become messages of their own."""
TEXT_APART = ("deepseek_r1_distill", "llama3_1", "llama3_2", "muse_glimmer")
"""Templates that leave out text before a call, which becomes a message of its own."""


def form_of(name: str, dialogue: str, *, appended: bool = False) -> str:
    """The form in which a template gets a dialogue: ``own``, its own rendering, or else."""
    results = "result" in dialogue or "call" in dialogue
    others = {
        "calls as text": results and name in NO_CALLS and not appended,
        "results as the user's": results and name in NO_RESULTS,
        "tools in the system message": dialogue == "tool description" and name not in TOOLS_TOLD,
        "later system as the user's": dialogue == "system in the middle"
        and (name in NO_LATER_SYSTEM or (appended and name in MOVED_SYSTEM)),
        "system as the user's": dialogue in ("system", "tool description") and name in NO_SYSTEM,
        "one call in a message": dialogue == "two results out of order" and name in ONE_CALL and (not appended or name != "gptoss"),
        "text and calls apart": dialogue == "text and call" and name in TEXT_APART and not appended,
    }
    return ", ".join(form for form, holds in others.items() if holds) or "own"


def table() -> str:
    """The families with the forms that they get, as a table in Markdown."""
    lines = [
        "| template | tools described | parser of calls | calls | several calls | results | system message | later system message |",
        "|---|" + "---|" * 7,
    ]
    for name in SOURCES:
        if name in REFUSED:
            lines.append(f"| `{name}` | refused: it writes no text | | | | | | |")
            continue
        cells = [
            "yes" if name in TOOLS_TOLD or name in PARSERS else "system message",
            f"`{PARSERS.get(name, 'json')}`",
            "as text" if name in NO_CALLS else "text apart" if name in TEXT_APART else "yes",
            "as text" if name in NO_CALLS else "one in a message" if name in ONE_CALL else "yes",
            "the user's" if name in NO_RESULTS else "yes",
            "the user's" if name in NO_SYSTEM else "yes",
            "the user's" if name in NO_LATER_SYSTEM else "yes; behind a turn the user's" if name in MOVED_SYSTEM else "yes",
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
