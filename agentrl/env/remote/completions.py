"""Answers of services that speak OpenAI's protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import RemoteError

if TYPE_CHECKING:
    from agentrl.env.remote.http import JsonClient


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Text of an answer, and the tokens of the request and of the answer as the service counts them."""

    text: str
    prompt_tokens: int
    completion_tokens: int


async def complete(client: JsonClient, body: Mapping[str, Any], api_key_env: str) -> ChatAnswer:
    """Ask for a chat completion, with the key in the environment variable `api_key_env`, if it has a value.

    Raises:
        RemoteError: If the service does not answer, refuses, or answers with something else.
    """
    from agentrl.env.remote.http import HttpSession  # only now: httpx takes long to import

    api_key = os.environ.get(api_key_env, "")
    session = HttpSession(headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    answer = (await client.call("POST", "/chat/completions", dict(body), session=session)).json()
    try:
        usage = answer.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        return ChatAnswer(str(answer["choices"][0]["message"]["content"] or ""), *tokens)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RemoteError(f"its answer is no chat completion: {answer!r:.200}", infrastructure=False) from error
