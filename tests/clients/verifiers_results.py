"""Writes a results file of the real verifiers, without a model and without the network: ``python verifiers_results.py FOLDER``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion
from verifiers.utils.eval_utils import make_dataset

from tests.clients.verifiers_tool import load_environment


def _completion(message: dict[str, Any], reason: str) -> ChatCompletion:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
    return ChatCompletion.model_validate({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


async def create(messages: list[dict[str, Any]], **options: Any) -> ChatCompletion:
    """Call the tool with the wrong number where there is a 3 in the question, and say what it answered."""
    last = messages[-1]
    if last["role"] == "tool":
        return _completion({"content": f"It is {last['content']}."}, "stop")
    number = next(int(word) for word in str(last["content"]).split() if word.isdecimal())
    function = {"name": "add", "arguments": f'{{"a": {9 if number == 3 else number}, "b": 2}}'}
    return _completion({"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}, "tool_calls")


def main(folder: str) -> None:
    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), base_url="http://127.0.0.1")
    environment = load_environment()
    results = asyncio.run(environment.evaluate(client, "m", num_examples=3, rollouts_per_example=2, save_results=False))
    make_dataset(results).to_json(Path(folder) / "results.jsonl")


if __name__ == "__main__":
    main(sys.argv[1])
