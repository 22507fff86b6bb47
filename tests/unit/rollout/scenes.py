"""Episodes against a scripted engine and a small ChatML tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl import AgentInstance, Task
from agentrl.config.sections import changed
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import GroupRequest, Trajectory
from agentrl.env.boundary import EnvSession
from agentrl.env.executor import Executor, ExecutorSession
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.env.threads import Threads
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import Episode
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.plan import RolloutConfig
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.templates import tokenizer

PATIENT = EpisodePlan(seed=5, rollout=RolloutConfig(max_new_tokens=32, max_turns=4))
"""With the deadlines of a run."""
SETTINGS = replace(changed(PATIENT, reset_timeout_s=1.5, step_timeout_s=1.5, env_threads=8), close_timeout_s=1.5)
LIMITS = SETTINGS.env
CODEC = ChatCodec(tokenizer("chatml"))
TASK = Task("What is one plus two?", label="three", id="sum")


def says(*texts: str) -> Callable[[GenerationRequest], list[int]]:
    """One text per turn, each with its end token; ``~`` at the end of a text leaves the end token out."""

    def answer(request: GenerationRequest) -> list[int]:
        text = texts[int(request.request_id.rsplit("-", 1)[1])]
        return CODEC.encode_text(text[:-1] if text.endswith("~") else f"{text}<|im_end|>")

    return answer


def env_class(step: Callable[[Any], Any], **methods: Any) -> type[AgentInstance]:
    """A class whose `step` is a plain function of the state."""
    return type("Env", (AgentInstance,), {"step": lambda self, state: step(state), **methods})


@dataclass
class Scene:
    """What one episode is played with."""

    env: type[Any]
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    settings: EpisodePlan = SETTINGS
    group_request: GroupRequest = GroupRequest(group_id=3, task=TASK, n_samples_per_prompt=2, version=0)  # noqa: RUF009

    def episode(self, index: int = 0) -> Episode | ExecutorEpisode:
        if issubclass(self.env, Executor):
            executor = ExecutorSession(self.env, "file.py", self.settings.env)
            return ExecutorEpisode(self.group_request, index, engine=self.engine, codec=CODEC, env=executor, settings=self.settings)
        session = EnvSession(self.env, "file.py", Threads(8), self.settings.env)
        agents_spec = multi_agent_spec(self.env, "file.py")
        return Episode(
            self.group_request, index, engine=self.engine, codec=CODEC, env=session, settings=self.settings, agents_spec=agents_spec
        )

    async def play(self, index: int = 0) -> Trajectory:
        (trajectory,) = await self.play_all(index)
        return trajectory

    async def play_all(self, index: int = 0) -> tuple[Trajectory, ...]:
        """The trajectories of all agents."""
        await self.engine.start()
        return await self.episode(index).run()
