"""One endpoint over one model for as long as a person wants it: what ``agentrl serve`` runs."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from agentrl.api.training import uninterrupted
from agentrl.cluster.build import build_engine, worker_environment
from agentrl.cluster.processes import ClusterPlan
from agentrl.config.evaluate import NO_ENGINE
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.serving import ApiError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, derive_seed
from agentrl.engine.parsers import answer_parser, fit_parser
from agentrl.engine.settings import EngineSettings
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import let_see, make_codec
from agentrl.rollout.endpoint.answers import JSON_PARSER
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.endpoint.session import EndpointSession
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.lane import Turns
from agentrl.rollout.observers import SamplerEngine, written_turn
from agentrl.rollout.recorder import Recorder
from agentrl.rollout.tasks import context_length
from agentrl.track.text import counted

NO_MODEL = "There is no model behind this endpoint."
NO_MODEL_CONTEXT = 32_768
NO_LIMIT = 2**31


class Say(Protocol):
    """Takes lines for a person; `is_result` marks the one that scripts read."""

    def __call__(self, line: str, *, is_result: bool = False) -> None:
        """Write one line."""


async def serve(plan: ClusterPlan, name: str, say: Say) -> None:
    """Serve the model of `plan` until it is cancelled; then say which branches the requests opened.

    Consumes requests, produces answers, waits for the engine; unblocked by cancellation alone.

    Args:
        plan: The port, the model, the engine (``none`` answers with a fixed text) and the budgets of an answer.
        name: The model, for people.
        say: Gets the line with address and key, refusals, and the summary.

    Raises:
        ConfigError: If the model or a parser of its answers cannot be used, or the port is taken.
        EngineError: If the engine does not start.
    """
    loads_model = plan.engine.engine.engine != NO_ENGINE
    # The limit is meant for one episode; a person may ask for as long as the endpoint is open.
    endpoint = replace(plan.episodes.endpoint, max_requests=NO_LIMIT)
    settings = replace(plan.episodes, endpoint=endpoint)
    tokenizer = load_tokenizer(settings.model.model, trust_remote_code=settings.model.trust_remote_code)
    parser = await asyncio.to_thread(answer_parser, endpoint, tokenizer)
    length = plan.engine.engine.max_model_len or context_length(settings.model.model)
    engine = _engine(plan.engine) if loads_model else _silent_engine(tokenizer, length)
    if loads_model:
        say(f"loading {name}")
    try:
        await engine.start()
        codec = make_codec(tokenizer, settings, engine.end_token_ids)
        let_see(codec, settings.model, settings.images)
        await asyncio.to_thread(fit_parser, codec, endpoint, parser)
        server = EndpointServer(endpoint, is_exact=True)
        session = _session(engine, codec, settings, server.turns, say)
        llm = await server.open(session)
        if codec.tool_parser != JSON_PARSER:
            say(f"tool calls are read by {codec.tool_parser}")
        say(f"serving {name} at {llm.root} key {llm.api_key}", is_result=True)
        try:
            await asyncio.Event().wait()
        finally:
            await uninterrupted(server.end(llm))
            await uninterrupted(server.close())
            say(summary(session.metrics()))
    finally:
        await uninterrupted(engine.close())


def summary(metrics: Mapping[str, float]) -> str:
    """Return the counts of a session in a line."""
    counts = Counter({name.removeprefix("endpoint/"): int(value) for name, value in metrics.items()})
    reasons = [
        f"{name.removeprefix('branches/').replace('_', ' ')} {count}" for name, count in counts.items() if name.startswith("branches/")
    ]
    told = f" ({', '.join(reasons)})" if reasons else ""
    branches = f"{counts['branches']} branch{'es' * (counts['branches'] != 1)}{told}"
    return f"{counted(counts['requests'], 'request')}, {branches}, {counts['refused']} refused, {counts['abandoned']} abandoned"


class _ServedSession(EndpointSession):
    """A session that tells a person of what it refuses."""

    say: Say

    def refused(self, problem: ApiError) -> None:
        super().refused(problem)
        self.say(f"refused with {problem.status}: {problem.message}")


def _session(engine: Engine, codec: ChatCodec, settings: EpisodePlan, turns: Turns, say: Say) -> EndpointSession:
    def seed_of(number: int) -> int:
        return derive_seed(settings.seed, "serve", number)

    recorder = Recorder("serve", engine=engine, codec=codec, settings=settings, seed_of=seed_of)
    session = _ServedSession(recorder, parser=codec.parser, max_requests=settings.endpoint.max_requests, turns=turns)
    session.say = say
    return session


def _engine(settings: EngineSettings) -> Engine:
    os.environ.update({name: value for name, value in worker_environment(settings).items() if name not in os.environ})
    return build_engine(settings)


def _silent_engine(tokenizer: Any, max_model_len: int) -> Engine:
    """Return an engine without a model, whose answers are one fixed text."""
    ids = [*tokenizer.encode(NO_MODEL, add_special_tokens=False), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]

    async def sample(request: GenerationRequest) -> Generation:
        return written_turn(ids, request.sampling.max_tokens)

    return SamplerEngine(sample, max_model_len=max_model_len or NO_MODEL_CONTEXT)
