"""``agentrl play``: be the policy in the terminal, or watch a model, step by step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agentrl.assets import VISION_MODEL
from agentrl.config.evaluate import PlayConfig
from agentrl.config.load import load
from agentrl.config.sections import changed
from agentrl.resolve.commands import PLAY, TINY
from agentrl.track.text import Screen

if TYPE_CHECKING:
    from agentrl.inspect.play import PlaySession


def main(words: list[str]) -> int:
    """Run the command with the words after ``play``; the exit code is 1 if an episode failed."""
    config = load(PLAY, words)
    return open_session(config).run(config.play.task)


def open_session(config: PlayConfig) -> PlaySession:
    """Return everything that is needed to play; a `ConfigError` says what cannot be used."""
    from agentrl.inspect.play import PlaySession
    from agentrl.resolve.parts import cluster_plan, fitting_model, training_tasks
    from agentrl.suites.load import check_servers, load_agent

    watching, play = config.model.model, config.play
    config = changed(config, model=(play.tokenizer or VISION_MODEL) if not watching else "" if watching == TINY else watching)
    spec = load_agent(config.run.agent)
    config = fitting_model(config, spec)
    check_servers(spec, config.sandbox.mcp)
    if hasattr(sys.stdin, "reconfigure"):
        # Bytes of another encoding must not end the session.
        sys.stdin.reconfigure(errors="surrogateescape")
    shown = {"tokens": play.show_tokens, "logprobs": play.logprobs}
    plan, tasks = cluster_plan(config), training_tasks(config, spec)
    return PlaySession(plan, spec, tasks, Screen(), model=bool(watching), pause=play.pause, episodes=play.episodes, **shown)
