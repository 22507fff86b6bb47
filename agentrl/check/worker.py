"""The process in which an environment is checked; started by ``agentrl check``, and lost if the environment crashes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.check.context import CheckSettings
from agentrl.check.elsewhere import answer
from agentrl.check.run import run_checks
from agentrl.check.tokenizer import FileTokenizer
from agentrl.core.errors import ConfigError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Message, Prompt
from agentrl.rollout.chat import ChatCodec, encode_prompt


class PromptCodec:
    """Prompts and answers in tokens, as a run has them.

    Args:
        model: Directory or hub name; what FileTokenizer cannot read is left to transformers.
    """

    def __init__(self, model: str) -> None:
        path = Path(model)
        tokenizer = FileTokenizer(path) if FileTokenizer.can_read(path) else load_tokenizer(model)
        self._codec = ChatCodec(tokenizer)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._control = sorted({*added, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
        self.end_token_ids = self._codec.end_token_ids

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of the first prompt."""
        return encode_prompt(self._codec, prompt, apply_chat_template=True)

    def encode_next(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Token ids of the environment's answer to a turn."""
        return self._codec.encode_next(messages, last_id)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text as it is."""
        return self._codec.encode_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._codec.decode(ids)

    def control_in(self, text: str) -> str:
        """The first control token that is spelled in a text, or ""."""
        return next((token for token in self._control if token in text), "")


def recorded_actions(path: str) -> dict[str, list[str]]:
    """Per task id, the texts of the turns of its best recorded episode.

    Args:
        path: ``trajectories.jsonl``, or the directory of the run that holds it.

    Raises:
        ConfigError: If there is no such file, or it holds no episode.
    """
    file = Path(path) / "trajectories.jsonl" if Path(path).is_dir() else Path(path)
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError("--recorded", path, f"cannot be read: {error}", "Name the directory of a run that recorded episodes.") from error
    best: dict[str, tuple[float, list[str]]] = {}
    for record in records:
        reward, turns = record.get("reward"), record.get("turns") or []
        task = str((record.get("task") or {}).get("id", ""))
        if reward is not None and turns and (task not in best or reward > best[task][0]):
            best[task] = (reward, [str(turn.get("text", "")) for turn in turns])
    if not best:
        raise ConfigError("--recorded", path, "holds no episode that ended well", "Record some with --record all.")
    return {task: texts for task, (_, texts) in best.items()}


def main() -> int:
    """Read settings, check, write events; with two files as arguments, be the second process that plays some episodes again."""
    if len(sys.argv) == 3:
        answer(sys.argv[1], sys.argv[2], PromptCodec)
        os._exit(0)
    settings = CheckSettings(**json.loads(sys.stdin.read()))
    status = os.open(os.environ.pop("AGENTRL_CHECK_STATUS"), os.O_CREAT | os.O_WRONLY)
    with open(os.environ.pop("AGENTRL_CHECK_EVENTS"), "a", encoding="utf-8") as events:

        def emit(event: Mapping[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            recorded = recorded_actions(settings.recorded) if settings.recorded else {}
            codec = PromptCodec(settings.model)
            run_checks(settings, codec, _without_end(recorded, codec), emit, status, command=(sys.executable, "-m", __spec__.name))
        except ConfigError as error:
            emit({"phase": "refused", "field": error.field, "value": str(error.value), "problem": error.problem, "remedy": error.remedy})
        except Exception:
            emit({"phase": "failed", "error": traceback.format_exc(), "report": {"findings": []}})
    os._exit(0)  # threads that the environment left behind must not keep it


def _without_end(recorded: Mapping[str, Sequence[str]], codec: PromptCodec) -> dict[str, list[str]]:
    """Actions as `step` gets them: without the token that ended the turn."""
    ends = [codec.decode([token]) for token in codec.end_token_ids]

    def cut(text: str) -> str:
        return next((text.removesuffix(end) for end in ends if text.endswith(end)), text)

    return {task: list(map(cut, texts)) for task, texts in recorded.items()}


if __name__ == "__main__":
    sys.exit(main())
