"""Environments of gem as an agent's environment; see https://github.com/axon-rl/gem.

``--agent gem:game:GuessTheNumber-v0-easy`` needs no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.env.adapters.specs import (
    SEEDS,
    EpisodeRandom,
    SuiteEnv,
    check_known,
    class_name,
    import_suite,
    refused,
    split_spec,
    take_count,
)
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepState

EXTRA = "gem"


class GemEnv(SuiteEnv):
    """One episode of a gem environment, with unchanged observations, rewards, ``terminated`` and ``truncated``.

    Each observation is sent as one message, followed by gem's suffix. gem's own wrappers, which
    repeat the history in every observation, are not used: the model's context holds the history already.
    """

    @classmethod
    def make(cls) -> Any:
        """Make gem's environment; `reset` does so while the global generators are the episode's."""
        import gem

        return gem.make(cls.env_id, **cls.env_options)

    def reset(self, state: ResetState) -> ResetResult:
        """Make and seed the environment."""
        self._random = EpisodeRandom(state.seed)
        with self._random.in_force():
            self._env = self.make()
            observation, info = self._env.reset(seed=state.seed % SEEDS)
        return ResetResult(_message(observation, info))

    def step(self, state: StepState) -> StepResult:
        """Pass the model's text to gem, which finds the action in it."""
        with self._random.in_force():
            observation, reward, terminated, truncated, info = self._env.step(state.action_text)
        over = bool(terminated or truncated)
        text = None if over else _message(observation, info)
        return StepResult(float(reward), text, terminated=bool(terminated), truncated=bool(truncated))

    def close(self) -> None:
        """Let go of the environment."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()


def load_gem(spec: str) -> type[GemEnv]:
    """Return the class for ``gem:ID`` or ``gem:ID?option=value&...``.

    Options are keyword arguments of the environment, or ``num_tasks``.

    Raises:
        EnvLoadError: If gem is not installed, has no such environment, or cannot make it with these options.
    """
    env_id, options = split_spec(spec)
    import_suite(spec, "gem.envs", EXTRA)
    from gem.envs.registration import ENV_REGISTRY

    check_known(spec, "gem", env_id, ENV_REGISTRY)
    num_tasks = take_count(spec, options, "num_tasks")
    attributes = {"env_id": env_id, "env_options": options, "num_tasks": num_tasks, "__module__": __name__}
    cls: type[GemEnv] = type(class_name(env_id.rpartition(":")[2], "GemEnv"), (GemEnv,), attributes)
    try:
        with EpisodeRandom(0).in_force():
            cls.make().reset(seed=0)
    except Exception as error:  # whatever the environment's constructor raises, a download that fails among it
        raise refused(spec, "making it", error, "Options are those of its class; some environments download data.") from error
    return cls


def _message(observation: Any, info: Mapping[str, Any]) -> str:
    parts = (str(observation).strip(), str(info.get("suffix") or "").strip())
    return "\n".join(part for part in parts if part)
