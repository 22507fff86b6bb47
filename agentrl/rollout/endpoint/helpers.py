"""Conversations of helpers told from those of agents, by their tools and their prompts.

Programs ask the model for more than their task: a title of the session, a summary of what it did, one token to see whether there is a
quota. Such conversations are recorded and shown with the reason why they are a helper's, and ``--train-branches agent`` leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agentrl.rollout.endpoint.neutral import ChatRequest
from agentrl.rollout.recorder import Context

PROBE = "asks for one token only"
TITLE = "asks for a title or a summary"
NO_TOOLS = "has no tools, and others of the episode have"

_TITLES = re.compile(r"\b(titles?|summar(y|ies|i[sz](e|es|ed|ing|ation))|topics?)\b", re.IGNORECASE)


class Asked(Protocol):
    """One request for an answer with its branch."""

    @property
    def request(self) -> ChatRequest:
        """The request."""

    @property
    def branch(self) -> str:
        """Name of the part of the agent that asked; "" without one."""

    @property
    def place(self) -> tuple[Context, int] | None:
        """Context of the answer, and its number among the turns there; `None` without one."""


def helpers(exchanges: Iterable[Asked]) -> dict[Context, str]:
    """Return the contexts of helpers with the reason why each is one.

    A branch that the agent has named is an agent's. So is one that has tools, in which the model answers more than once, or which begins
    with an answer; sub-agents are agents therefore. If nothing else were left, all of them are agents.
    """
    asked: dict[Context, list[Asked]] = {}
    for exchange in exchanges:
        if exchange.place is not None:
            asked.setdefault(exchange.place[0], []).append(exchange)
    has_tools = any(one.request.tools for requests in asked.values() for one in requests)
    reasons = {context: _reason(requests, has_tools) for context, requests in asked.items()}
    is_agent = any(not why and not context.masked for context, why in reasons.items())
    return {context: why for context, why in reasons.items() if why} if is_agent else {}


def _reason(asked: Sequence[Asked], has_tools: bool) -> str:
    """Return why a conversation is a helper's; "" if it is an agent's."""
    request = asked[0].request
    if any(one.branch for one in asked):
        return ""
    if all(one.request.max_tokens == 1 for one in asked):
        return PROBE
    if len(asked) > 1 or request.tools:
        return ""
    if _TITLES.search(_instructions(request)):
        return TITLE
    return NO_TOOLS if has_tools and all(message["role"] != "assistant" for message in request.messages) else ""


def _instructions(request: ChatRequest) -> str:
    """The system prompt, and the last message of the user, which asks for the title or the summary."""
    system = [message["content"] for message in request.messages if message["role"] == "system"]
    asks: Mapping[str, object] = next((message for message in reversed(request.messages) if message["role"] == "user"), {})
    return "\n".join((*system, str(asks.get("content", ""))))
