"""Engines that join and leave a run under way: a request is a file in the run directory, and so is its answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.files import write_text
from agentrl.flow.pool import RolloutPool

REQUEST, ANSWER = "scale-request.json", "scale-answer.json"
POLL_S = 0.5
ANSWER_TIMEOUT_S = 30.0


def request_engines(run_dir: Path, number: int, timeout_s: float = ANSWER_TIMEOUT_S, *, grows: bool = False) -> str:
    """Ask the run that writes to `run_dir` for `number` engines, also beyond the room if its cluster `grows`; returns what it answers.

    Raises:
        ConfigError: If no run answers, or the run refuses.
    """
    if number < 1:
        raise ConfigError("--num-engines", number, "a run needs one engine at least", "Give 1 or more.")
    if not (run_dir / "config.json").is_file():
        raise ConfigError("RUN", str(run_dir), "is no run directory", "Give the folder that `agentrl train` wrote to.")
    name = uuid.uuid4().hex
    write_text(run_dir / REQUEST, json.dumps({"id": name, "num_engines": number, "grows": grows}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(POLL_S / 5)
        answer = _read(run_dir / ANSWER)
        if answer.get("id") == name:
            (run_dir / ANSWER).unlink(missing_ok=True)
            if problem := answer.get("problem"):
                raise ConfigError("--num-engines", number, str(problem), str(answer.get("remedy", "")))
            return str(answer["said"])
    # The request must not be answered later, when nobody waits for it.
    (run_dir / REQUEST).unlink(missing_ok=True)
    raise ConfigError("RUN", str(run_dir), f"no run answered within {timeout_s:.0f} s", "Give the folder of a run that trains now.")


async def answer_requests(run_dir: Path, pool: RolloutPool) -> None:
    """Answer what `request_engines` asks, until cancelled."""
    for name in (REQUEST, ANSWER):
        (run_dir / name).unlink(missing_ok=True)  # of an earlier part of the run
    while True:
        await asyncio.sleep(POLL_S)
        request = _read(run_dir / REQUEST)
        if not request:
            continue
        # Taken away first, so that a request is carried out once, whatever comes of it.
        (run_dir / REQUEST).unlink(missing_ok=True)
        answer: dict[str, object] = {"id": request.get("id")}
        try:
            answer["said"] = pool.scale(int(str(request["num_engines"])), grows=bool(request.get("grows")))
        except ConfigError as error:
            answer |= {"problem": error.problem, "remedy": error.remedy}
        write_text(run_dir / ANSWER, json.dumps(answer))


def _read(path: Path) -> dict[str, object]:
    """Return the content of a file, or nothing if it is not there."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
