"""One reward model over HTTP for as long as a person wants it: what ``agentrl serve-reward-model`` runs."""

from __future__ import annotations

import asyncio

from agentrl.api.serving import Say
from agentrl.api.training import uninterrupted
from agentrl.cluster.build import device
from agentrl.config.serving import RewardServing
from agentrl.core.errors import ConfigError
from agentrl.core.serving import LoopbackServer
from agentrl.engine.reward_model import RewardModel
from agentrl.engine.reward_model_facts import RewardModelSettings
from agentrl.engine.reward_server import RewardApp
from agentrl.engine.scoring import BatchedScorer
from agentrl.track.text import counted


async def serve_reward_model(serving: RewardServing, say: Say) -> None:
    """Serve until it is cancelled; then say how many texts were scored.

    Consumes requests, produces answers, waits for the model; unblocked by cancellation alone.

    Raises:
        ConfigError: If the model cannot be used, or the port is taken.
    """
    settings = RewardModelSettings(
        model=serving.model,
        head=serving.value_head_prefix,
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
        try:
            root = await server.start()
        except OSError as error:
            address = f"{serving.host}:{serving.port}"
            raise ConfigError("--port", address, f"cannot be used: {error.strerror}", "Choose another, or 0 for a free one.") from error
        say(f"serving {serving.model} at {root}", is_result=True)
        try:
            await asyncio.Event().wait()
        finally:
            await uninterrupted(server.close())
            say(f"{counted(app.num_scored, 'text')} scored, {app.num_refused} requests refused, {app.num_failed} failed")
    finally:
        await uninterrupted(scorer.close())
