"""What a request to the endpoint costs: conversations of many episodes at once, straight to the ASGI application.

python -m tests.benchmarks.endpoint_cost [EPISODES] [TURNS]

CPU time of the process per request, without sockets and without an SDK: reading the body, finding the place in the message graph,
making the prompt, a scripted engine, recording, and rendering the answer; the client's JSON is in it too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from agentrl import BlackBoxAgent, ModelEndpoint, Task
from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.process import collect_rarely
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import GroupRequest
from agentrl.env.black_box import BlackBoxSession
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.episode_plan import EpisodePlan
from tests.scripted_engine import ScriptedEngine

SETTINGS = changed(EpisodePlan(), max_new_tokens=32)
ANSWER = [*range(20, 40), 1]


async def call(server: EndpointServer, llm: ModelEndpoint, body: Any) -> Any:
    """One request without a socket."""
    bodies, sent = [json.dumps(body).encode()], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        await asyncio.Event().wait()
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {llm.api_key}".encode())]
    await server({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}, receive, send)
    return json.loads(sent[1]["body"])


def run(episodes: int, turns: int) -> float:
    """Return milliseconds of CPU per request."""
    collect_rarely()  # as a rollout worker does
    asyncio.run(_run(2, 1))  # imports
    return asyncio.run(_run(episodes, turns))


async def _run(episodes: int, turns: int) -> float:
    server = EndpointServer()

    class Talks(BlackBoxAgent):
        async def run(self, task: Task, llm: ModelEndpoint) -> float:
            messages: list[Any] = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": f"{task.id}: what now?"}]
            for number in range(turns):
                answer = await call(server, llm, {"model": "m", "messages": messages})
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"And then, after {number}?"}]
            return 1.0

    codec = ChatCodec(load_tokenizer(str(tiny_model_path())))
    engine = ScriptedEngine(answer=lambda request: ANSWER, max_model_len=100_000, delay=lambda request: 0.005)
    await engine.start()
    group_request = GroupRequest(group_id=0, task=Task("?", id="t"), n_samples_per_prompt=episodes, version=0)
    members = [
        BlackBoxEpisode(
            group_request,
            index,
            engine=engine,
            codec=codec,
            env=BlackBoxSession(Talks, __file__, SETTINGS.env),
            settings=SETTINGS,
            server=server,
        )
        for index in range(episodes)
    ]
    cpu = time.process_time()
    outcomes = await asyncio.gather(*(member.run() for member in members))
    cpu = time.process_time() - cpu
    await server.close()
    assert all(trajectory.error is None for (trajectory,) in outcomes)
    return 1000 * cpu / (episodes * turns)


if __name__ == "__main__":
    cpu_ms = run(*(map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (64, 8)))
    print(f"{cpu_ms:.2f} ms of CPU per request")
