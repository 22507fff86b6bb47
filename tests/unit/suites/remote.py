"""Playing episodes on environment servers: a scripted engine that reads the prompt, with a real tokenizer's template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.config.sections import changed
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import GroupRequest, Task, Trajectory
from agentrl.env.agent import AgentInstance
from agentrl.env.boundary import EnvSession
from agentrl.env.threads import Threads
from agentrl.rollout.episode import Episode
from agentrl.rollout.episode_plan import EpisodePlan
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC

SETTINGS = changed(EpisodePlan(), max_new_tokens=4000, max_turns=12, reset_timeout_s=60.0, step_timeout_s=60.0)
Player = Callable[[int, str], str]
"""Number of the turn and all text so far; what the model writes."""


def script(*texts: str) -> Player:
    return lambda turn, text: texts[turn]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(cls: type[AgentInstance], task: Task, player: Player, index: int = 0, **settings: Any) -> Trajectory:
    """One whole episode."""

    def answer(request: GenerationRequest) -> list[int]:
        text = player(int(request.request_id.rsplit("-", 1)[1]), CODEC.decode(request.prompt_ids.tolist()))
        return CODEC.encode_text(f"{text}<|im_end|>")

    engine = ScriptedEngine(answer, max_model_len=100_000)
    await engine.start()
    group_request = GroupRequest(group_id=index, task=task, n_samples_per_prompt=1, version=0)
    used = changed(SETTINGS, **settings)
    session = EnvSession(cls, "file.py", Threads(2), used.env)
    played: Any = await Episode(group_request, 0, engine=engine, codec=CODEC, env=session, settings=used).run()
    return played[0] if isinstance(played, tuple) else played


def said(trajectory: Trajectory) -> str:
    """All text of an episode."""
    return "".join(turn.prompt_text + turn.text for turn in trajectory.turns)


def outcome(trajectory: Trajectory) -> tuple[str, float | None]:
    return str(trajectory.status), trajectory.reward


def metric(trajectory: Trajectory, name: str) -> float:
    metrics: Mapping[str, float] = trajectory.metrics
    return metrics[name]
