"""``agentrl serve-reward-model``: a reward model over HTTP, for ``--remote-rm-url`` of this system and of OpenRLHF."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from agentrl.api.serving import Say
from agentrl.api.training import uninterrupted
from agentrl.cli.serve import say, start_at, until_signal
from agentrl.cli.words import command_of, read, word
from agentrl.cluster.build import device
from agentrl.core.serving import LoopbackServer
from agentrl.core.settings import Count, CountOrZero, Port
from agentrl.engine.reward_model import RewardModel
from agentrl.engine.reward_model_facts import RewardModelSettings, reward_model_facts
from agentrl.engine.reward_server import RewardApp
from agentrl.engine.scoring import BatchedScorer
from agentrl.track.text import counted


@dataclass(frozen=True, kw_only=True)
class ServeRewardModelArgs:
    """Offer a reward model over HTTP: POST {"query", "prompts", "labels"} gives {"rewards", "scores", "extra_logs"}. Ctrl-C ends it."""

    model: str = ""
    """A reward model: a Hugging Face directory or hub name, as ``agentrl reward-model`` writes it."""
    port: Port = 5000
    """Port to listen on. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Whoever reaches it may ask the model; there is no key."""
    batch_size: Count = 64
    """Texts that go through the model at once."""
    max_pending: Count = 1024
    """Texts that may wait; further requests are refused with 429 and ``Retry-After``."""
    max_tokens: CountOrZero = 0
    """Tokens that are read; of a longer text the last ones. 0: the context length of the model."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. ``auto``: float32 on CPU, bfloat16 on GPU."""
    trust_remote_code: bool = False
    """Allow the model's own Python code to run."""


SERVE_REWARD_MODEL = command_of("serve-reward-model", ServeRewardModelArgs, word("model", "MODEL"))


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    args: ServeRewardModelArgs = read(SERVE_REWARD_MODEL, words)
    reward_model_facts(args.model, "MODEL")
    return until_signal(serve_reward_model(args, say))


async def serve_reward_model(serving: ServeRewardModelArgs, say: Say) -> None:
    """Serve until it is cancelled; then say how many texts were scored.

    Consumes requests, produces answers, waits for the model; unblocked by cancellation alone.

    Raises:
        ConfigError: If the model cannot be used, or the port is taken.
    """
    settings = RewardModelSettings(
        model=serving.model,
        device=device(),
        dtype=serving.dtype,
        batch_size=serving.batch_size,
        max_tokens=serving.max_tokens,
        trust_remote_code=serving.trust_remote_code,
    )
    scorer = BatchedScorer(RewardModel(settings), batch_size=serving.batch_size, name=serving.model)
    app = RewardApp(scorer, model=serving.model, max_pending=serving.max_pending)
    server = LoopbackServer(app, port=serving.port, host=serving.host, name="reward server")
    say(f"loading {serving.model}")
    try:
        await scorer.start()
        root = await start_at(server, serving.host, serving.port)
        say(f"serving {serving.model} at {root}", is_result=True)
        try:
            await asyncio.Event().wait()
        finally:
            await uninterrupted(server.close())
            say(f"{counted(app.num_scored, 'text')} scored, {app.num_refused} requests refused, {app.num_failed} failed")
    finally:
        await uninterrupted(scorer.close())
