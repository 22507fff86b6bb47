"""Episodes of black-box agents against a scripted engine, over real HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from agentrl import BlackBoxAgent, ModelEndpoint, Task
from agentrl.config.sections import changed
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import GroupRequest, Trajectory
from agentrl.env.black_box import BlackBoxSession
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.episode_plan import EpisodePlan
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT
from tests.unit.rollout.templates import tokenizer

TASK = Task("What is one plus two?", label="three", id="sum")
CODEC = ChatCodec(tokenizer("qwen_tools"))
SETTINGS: EpisodePlan = changed(PATIENT, max_new_tokens=400)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

ASKS = '''
from agentrl import BlackBoxAgent, Task

class Asks(BlackBoxAgent):
    """Asks twice, then once more from the beginning."""

    @classmethod
    def tasks(cls):
        return [Task("1+2=?", label="3")]

    def run(self, task, llm):
        with llm.openai(sync=True) as client:
            messages = [{"role": "user", "content": task.prompt}]
            for _ in range(2):
                answer = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message
                messages += [answer, {"role": "user", "content": "Sure?"}]
            client.chat.completions.create(model=llm.model, messages=messages[:1])
        return float(len(answer.content) % 2)
'''
"""File with an agent that asks three times; the last question is the first again, and so a branch."""

Run = Callable[[Task, ModelEndpoint], Awaitable[Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(*texts: str, codec: ChatCodec = CODEC) -> Callable[[GenerationRequest], list[int]]:
    """One text per request, by when it began, each with its end token; the last one again and again."""

    def answer(request: GenerationRequest) -> list[int]:
        number = int(request.request_id.rsplit("-", 1)[1])
        return [*codec.encode_text(texts[min(number, len(texts) - 1)]), *codec.turn_end_ids]

    return answer


def agent(run: Run) -> type[BlackBoxAgent]:
    async def method(self: Any, task: Task, llm: ModelEndpoint) -> Any:
        return await run(task, llm)

    return type("Own", (BlackBoxAgent,), {"run": method})


@dataclass
class Stage:
    """What one episode is played with, and what is left of it."""

    cls: type[BlackBoxAgent]
    engine: ScriptedEngine
    codec: ChatCodec = CODEC
    settings: EpisodePlan = SETTINGS
    episodes: list[BlackBoxEpisode] = field(default_factory=list)

    async def play(self, server: EndpointServer, index: int = 0) -> tuple[Trajectory, ...]:
        group_request = GroupRequest(group_id=3, task=TASK, n_samples_per_prompt=1, version=0, record=1)
        env = BlackBoxSession(self.cls, "file.py", self.settings.env)
        episode = BlackBoxEpisode(
            group_request, index, engine=self.engine, codec=self.codec, env=env, settings=self.settings, server=server
        )
        self.episodes.append(episode)
        return await episode.run()


async def play(run: Run | type[BlackBoxAgent], *texts: str, answer: Any = None, **changes: Any) -> tuple[Stage, tuple[Trajectory, ...]]:
    """Play an episode in which the model says these texts."""
    codec = changes.pop("codec", CODEC)
    engine = ScriptedEngine(answer=answer or says(*texts, codec=codec), max_model_len=changes.pop("max_model_len", 4096))
    engine.delay = changes.pop("delay", engine.delay)
    cls = run if isinstance(run, type) else agent(run)
    stage = Stage(cls, engine, codec, changed(replace(SETTINGS), **changes))
    await engine.start()
    server = EndpointServer()
    try:
        return stage, await stage.play(server)
    finally:
        await server.close()


async def play_one(run: Run | type[BlackBoxAgent], *texts: str, **changes: Any) -> tuple[Stage, Trajectory]:
    """Play an episode that has one trajectory."""
    stage, (trajectory,) = await play(run, *texts, **changes)
    return stage, trajectory


def sampled(trajectory: Trajectory) -> list[list[int]]:
    """The tokens that each turn sampled."""
    return [turn.token_ids.tolist() for turn in trajectory.turns]


def text_of(ids: Sequence[int], codec: ChatCodec = CODEC) -> str:
    return codec.decode(list(ids))


def caller(llm: ModelEndpoint, **options: Any) -> httpx.AsyncClient:
    """A client that marks nothing."""
    return httpx.AsyncClient(base_url=llm.base_url, headers={"authorization": f"Bearer {llm.api_key}"}, trust_env=False, **options)
