"""How soon streams of the endpoint begin, and what they cost: many at once, on a real engine, straight to the ASGI application.

python -m tests.benchmarks.endpoint_streams [STREAMS] [transformers|vllm|scripted]

The delay from the sampling of a token to the bytes of its event is counted in decoding steps, by the clock: what it takes, over the time
between two tokens. CPU time is that of the process without the engine's, which the scripted engine alone can tell apart.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from agentrl import BlackBoxAgent, ModelEndpoint, Task
from agentrl.assets import tiny_model_path
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.process import collect_rarely
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, GroupRequest
from agentrl.engine.settings import prepare_environment
from agentrl.env.black_box import BlackBoxSession
from agentrl.resolve.parts import engine_plan, episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from tests.scripted_engine import ScriptedEngine

CONFIG = changed(TrainConfig(), model=str(tiny_model_path()), max_new_tokens=48, max_requests=100_000, max_model_len=1024, kv_cache_gib=0.5)
STEP_S = 0.02
"""Seconds of a step of the scripted engine."""


def engine_of(kind: str) -> Engine:
    """Return an engine that is not started."""
    settings = engine_plan(CONFIG, "cpu")
    prepare_environment(settings.device)
    if kind == "transformers":
        from agentrl.engine.transformers_engine import TransformersEngine

        return TransformersEngine(settings)
    if kind == "vllm":
        from agentrl.engine.vllm_engine import VllmEngine

        return VllmEngine(settings)
    return ScriptedEngine(answer=lambda request: [*range(20, 67), 1], max_model_len=1024, step_s=STEP_S)


class Noted:
    """The times of every token of a request, and of the first bytes that its client got."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[float]] = {}
        self.bytes: dict[int, list[float]] = {}

    def generate(self, engine: Any) -> Any:
        """Return the engine's method with a note of each token."""
        inner = engine.generate

        async def generate(request: GenerationRequest) -> Generation:
            times = self.tokens.setdefault(int(request.request_id.rpartition("-")[2]), [])
            listener = request.on_tokens

            def on_tokens(new: Any) -> None:
                times.append(time.perf_counter())
                if listener is not None:
                    listener(new)

            return await inner(request if listener is None else replace(request, on_tokens=on_tokens))  # type: ignore[no-any-return]

        return generate


async def ask(server: EndpointServer, llm: ModelEndpoint, number: int, *, stream: bool, noted: Noted) -> None:
    """One request without a socket."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"{number}: 12+5?"}], "stream": stream}
    bodies = [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop()}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            noted.bytes.setdefault(number, []).append(time.perf_counter())

    headers = [(b"authorization", f"Bearer {llm.api_key}".encode())]
    await server({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}, receive, send)


async def run(streams: int, kind: str) -> dict[str, float]:
    """Return the figures of one engine."""
    collect_rarely()  # as a rollout worker does
    server, noted, found = EndpointServer(), Noted(), dict[str, float]()

    class Asks(BlackBoxAgent):
        async def run(self, task: Task, llm: ModelEndpoint) -> float:
            for stream in (False, True):  # the first round warms up
                cpu = time.process_time()
                first = len(noted.tokens)
                await asyncio.gather(*(ask(server, llm, first + number, stream=stream, noted=noted) for number in range(streams)))
                found[f"cpu_ms_{'stream' if stream else 'plain'}"] = 1000 * (time.process_time() - cpu) / streams
            return 1.0

    engine: Any = engine_of(kind)
    await engine.start()
    settings = episode_plan(CONFIG).with_model(CONFIG.model.model)
    codec = ChatCodec(load_tokenizer(CONFIG.model.model), end_token_ids=engine.end_token_ids)
    generate = noted.generate(engine)
    watched = type("Watched", (type(engine),), {"generate": lambda self, request: generate(request), "__slots__": ()})
    engine.__class__ = watched
    group_request = GroupRequest(group_id=0, task=Task("?", id="t"), n_samples_per_prompt=1, version=0)
    session = BlackBoxSession(Asks, __file__, settings.env)
    episode = BlackBoxEpisode(group_request, 0, engine=engine, codec=codec, env=session, settings=settings, server=server)
    (trajectory,) = await episode.run()
    await server.close()
    await engine.close()
    assert trajectory.error is None, trajectory.error
    told = {number: times for number, times in noted.tokens.items() if times}
    steps = [later - earlier for times in told.values() for earlier, later in pairwise(times)]
    waits = [noted.bytes[number][0] - times[0] for number, times in told.items()]
    found |= {"step_ms": 1000 * median(steps), "first_byte_ms": 1000 * max(waits), "events": sum(map(len, noted.bytes.values())) / streams}
    return found | {"first_byte_steps": max(waits) / median(steps), "tokens": sum(map(len, told.values())) / len(told)}


if __name__ == "__main__":
    count, name = (int(sys.argv[1]) if len(sys.argv) > 1 else 64), (sys.argv[2] if len(sys.argv) > 2 else "transformers")
    for label, value in asyncio.run(run(count, name)).items():
        print(f"{label:20} {value:.2f}")
