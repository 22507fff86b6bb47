"""The first tokens of an episode, from what the task and `reset` say."""

from __future__ import annotations

from agentrl.core.types import Prompt
from agentrl.env.results import RawText
from agentrl.rollout.chat import ChatCodec


def encode_prompt(codec: ChatCodec, prompt: Prompt, *, apply_chat_template: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        codec: Of the model's tokenizer.
        prompt: Chat messages; plain text, rendered as one user message if `apply_chat_template`; `RawText`, taken as it is.
        apply_chat_template: Whether plain text is rendered.

    Raises:
        EnvResultError: If the chat template refuses the messages.
    """
    if not isinstance(prompt, str):
        return codec.encode_chat(prompt)
    if isinstance(prompt, RawText) or not apply_chat_template:
        return codec.encode_text(prompt)
    return codec.encode_question(prompt)
