"""``agentrl serve``: the endpoint that black-box agents are given in training, over a model, to try an agent first."""

from __future__ import annotations

import sys

from agentrl.api.background import run_until_signal
from agentrl.config.commands import SERVE
from agentrl.config.load import load


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    config = load(SERVE, words)
    from agentrl.api.serving import serve

    try:
        run_until_signal(serve(config, _say))
    except KeyboardInterrupt:
        return 0
    return 1  # the server ended by itself


def _say(line: str, *, is_result: bool = False) -> None:
    stream = sys.stdout if is_result else sys.stderr
    stream.write(f"{line}\n" if is_result else f"agentrl: {line}\n")
    stream.flush()
