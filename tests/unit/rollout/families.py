"""The chat templates of real model families, as installed packages carry them, and dialogues to render with them."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.unit.rollout.templates import tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": SCHEMA}}]
_CONTROL = re.compile(
    r"<\|[\w:/ ]+\|>|<\uff5c[^\uff5c\s]+\uff5c>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|<\|?/?(?:turn|tool_call|tool_response|channel)\|?>|</?s>|<end_of_utterance>|<\|[A-Z_]+_TOKEN\|>"
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
RESULTS = [said("tool", f"RESULT-{place}", name="add", tool_call_id=f"c0000000{place}") for place in range(2)]
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
