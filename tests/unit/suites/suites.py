"""Plays an environment of a suite: through its methods, through `EnvSession`, and through a whole episode."""

from collections.abc import Sequence
from typing import Any

from agentrl import ResetState, StepState, Task
from agentrl.config.sections import changed
from agentrl.core.types import GroupRequest, Trajectory
from agentrl.env.boundary import EnvLimits, EnvSession
from agentrl.env.threads import Threads
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, says

LIMITS = EnvLimits(reset_timeout_s=20, step_timeout_s=20, close_timeout_s=5)


def begin(spec: str, seed: int = 0) -> tuple[Any, str]:
    """The environment after its reset, and what it said."""
    env = load_agent(spec).load()()
    task = Task("x", seed=seed)
    return env, env.reset(ResetState(task=task, observation=task.prompt, label=None, seed=seed)).observation


def say(env: Any, text: str) -> Any:
    return env.step(StepState(action_text=text))


def script(spec: str, seed: int, answers: Sequence[str]) -> list[Any]:
    """All that an environment says."""
    env, first = begin(spec, seed)
    said = [first]
    for answer in answers:
        result = say(env, answer)
        said.append((result.observation, result.reward, result.terminated, result.truncated))
        if result.terminated or result.truncated:
            break
    env.close()
    return said


async def session(spec: str, seed: int, answers: Sequence[str]) -> list[Any]:
    """The same through the boundary to user code, where observations are lists of messages."""
    env = EnvSession(load_agent(spec).load(), spec, Threads(2), LIMITS)
    try:
        said: list[Any] = [(await env.reset(Task("x"), seed)).observation[0]["content"]]
        for answer in answers:
            result = await env.step(StepState(action_text=answer))
            text = result.observation[0]["content"] if result.observation else None
            said.append((text, result.reward, result.terminated, result.truncated))
            if result.terminated or result.truncated:
                break
    finally:
        await env.close()
    return said


async def episode(spec: str, seed: int, answers: Sequence[str]) -> Trajectory:
    """A whole episode against a scripted engine."""
    settings = changed(PATIENT, max_new_tokens=512, max_turns=len(answers))
    engine = ScriptedEngine(answer=says(*answers), max_model_len=16384)
    group_request = GroupRequest(group_id=1, task=Task("x", seed=seed), n_samples_per_prompt=2, version=0)
    return await Scene(load_agent(spec).load(), engine, settings, group_request).play()
