"""The process in which an environment is checked; started by ``agentrl check``, and lost if the environment crashes."""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.check.elsewhere import answer
from agentrl.check.findings import CheckSettings
from agentrl.check.run import run_checks
from agentrl.check.tokenizer import load_codec
from agentrl.core.errors import ConfigError
from agentrl.rollout.chat import ChatCodec

GIVEN = "AGENTRL_CHECK_GIVEN"
"""Environment variable that names a file with an environment that was given as an object in Python, pickled."""


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
    if GIVEN in os.environ:
        pickle.loads(Path(os.environ[GIVEN]).read_bytes())  # from now on `load_agent` knows it
    if len(sys.argv) == 3:
        answer(sys.argv[1], sys.argv[2])
        os._exit(0)
    settings: CheckSettings = pickle.loads(sys.stdin.buffer.read())
    status = os.open(os.environ.pop("AGENTRL_CHECK_STATUS"), os.O_CREAT | os.O_WRONLY)
    with open(os.environ.pop("AGENTRL_CHECK_EVENTS"), "a", encoding="utf-8") as events:

        def emit(event: Mapping[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            recorded = recorded_actions(settings.recorded) if settings.recorded else {}
            codec = load_codec(settings)
            run_checks(settings, codec, _without_end(recorded, codec), emit, status, command=(sys.executable, "-m", __spec__.name))
        except ConfigError as error:
            emit({"phase": "refused", "field": error.field, "value": str(error.value), "problem": error.problem, "remedy": error.remedy})
        except Exception:
            emit({"phase": "failed", "error": traceback.format_exc(), "report": {"findings": []}})
    os._exit(0)  # threads that the environment left behind must not keep it


def _without_end(recorded: Mapping[str, Sequence[str]], codec: ChatCodec) -> dict[str, list[str]]:
    """Actions as `step` gets them: without the token that ended the turn."""
    ends = [codec.decode([token]) for token in codec.end_token_ids]

    def cut(text: str) -> str:
        return next((text.removesuffix(end) for end in ends if text.endswith(end)), text)

    return {task: list(map(cut, texts)) for task, texts in recorded.items()}


if __name__ == "__main__":
    sys.exit(main())
