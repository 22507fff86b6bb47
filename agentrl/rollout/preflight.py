"""What can be said about prompts before an engine is started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.types import Task
from agentrl.rollout.chat import ChatCodec, load_tokenizer
from agentrl.rollout.prompt import encode_prompt
from agentrl.rollout.settings import EpisodeSettings

TEMPLATE_TOKENS, MESSAGE_TOKENS = 128, 32


def check_prompts(settings: EpisodeSettings, tasks: Sequence[Task], max_model_len: int) -> None:
    """Check that the tasks' own prompts leave room to answer; what an environment's `reset` returns is not known yet.

    A token stands for one byte at least, so prompts with fewer bytes than the context has tokens need no tokenizer; it is
    loaded, and with it transformers, only if a prompt is longer than that.

    Args:
        settings: Model and budgets.
        tasks: Some tasks, the more the better.
        max_model_len: Context length in tokens; 0 if not known, which leaves only ``--max-episode-tokens``.

    Raises:
        ConfigError: For the first prompt that is too long, or that the chat template refuses.
    """
    limit = min((length for length in (max_model_len, settings.max_episode_tokens) if length), default=0)
    doubtful = [task for task in tasks if _most_tokens(task, settings) >= limit] if limit else []
    if not doubtful:
        return
    tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
    codec = ChatCodec(tokenizer, system_prompt=settings.system_prompt)
    for task in doubtful:
        length = len(encode_prompt(codec, task.prompt, apply_chat_template=settings.apply_chat_template))
        if length >= limit:
            flag = "--max-model-len" if limit == max_model_len else "--max-episode-tokens"
            problem = f"the prompt of task {task.id!r} has {length} tokens and leaves no room to answer"
            raise ConfigError(flag, limit, problem, "Raise it as far as the model allows, or shorten or remove the prompt.")


def context_length(model: str) -> int:
    """The context length that a local model directory states; 0 if it is not known without a download.

    Args:
        model: Hugging Face directory or hub name.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        return 0
    config = json.loads(path.read_text(encoding="utf-8"))
    return int(config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings") or 0)


def _most_tokens(task: Task, settings: EpisodeSettings) -> int:
    messages = 1 if isinstance(task.prompt, str) else len(task.prompt)
    return _num_bytes(task.prompt) + _num_bytes(settings.system_prompt) + MESSAGE_TOKENS * messages + TEMPLATE_TOKENS


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0
