"""Random agents on the endpoint: every sampled token is trained exactly once, or recorded with the reason why not; all requests replay.

A made-up agent rewrites the calls that it sends back, keeps or drops reasoning, edits, drops and reorders messages, compacts, calls tools
side by side, forks, repeats requests, changes its system prompt, and has helpers for titles, summaries and probes. The reference knows
nothing of the graph: it takes each request that reached the engine with the tokens sampled for it.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.protocols import EngineLimits, GenerationRequest
from agentrl.core.serving import ApiError
from agentrl.core.types import FinishReason, GroupRequest
from agentrl.inspect.requests import replay_requests
from agentrl.learner.batch import merge_turns
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint import chat_completions
from agentrl.rollout.endpoint.answers import JsonAnswerParser
from agentrl.rollout.endpoint.exchange import Exchange
from agentrl.rollout.endpoint.request_log import RequestLog
from agentrl.rollout.endpoint.session import EndpointSession
from agentrl.rollout.episode import turn_seed
from agentrl.rollout.recorder import Recorder
from agentrl.track.jsonl import encode
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import ADD, CALL, SETTINGS, TASK, user
from tests.unit.rollout.templates import tokenizer

CODECS = {family: ChatCodec(tokenizer(family)) for family in ("qwen_tools", "chatml", "gemma", "llama3")}
TEXTS = ("three", "one two", f"<think>\nHm.\n</think>\n\n{CALL}", f"{CALL}\n{CALL}", "<think>\nSo.\n</think>\n\nfour", "")
DEEDS = (
    *("go on", "go on", "go on", "edit", "drop", "swap", "compact", "system", "tools", "fork", "again"),
    *("leave", "other", "probe", "summary"),
)


class Agent:
    """An agent that keeps its history as most do, and now and then does something to it."""

    def __init__(self, session: EndpointSession, rng: random.Random) -> None:
        self.session, self.rng = session, rng
        self.system, self.tools = "Be quick.", [ADD]
        self.messages: list[Any] = [user("1+2?")]

    async def act(self, deed: str) -> None:
        if deed == "again" and self.session.exchanges:
            await self.ask(self.body())
        elif deed == "fork":
            await asyncio.gather(*(self.ask(self.body([*self.messages, user(text)])) for text in ("left", "right")))
        elif deed == "leave":
            await self.ask(self.body([*self.messages, user("never mind")]), leaves=True)
        elif deed == "other":
            await self.ask({"model": "m", "messages": [user("Give this a title.")]})
        elif deed == "probe":
            await self.ask({**self.body([user("quota")]), "max_tokens": 1})
        elif deed == "summary":
            summary = await self.ask({"model": "m", "messages": [*self.messages, user("Summarize the above.")]})
            self.messages = [user("Go on."), user(summary["content"] or "Nothing." if summary else "Nothing.")]
        else:
            self.change(deed)
            answer = await self.ask(self.body())
            if answer is not None:
                self.read(answer)

    def change(self, deed: str) -> None:
        index = self.rng.randrange(len(self.messages))
        if deed == "edit":
            self.messages[index] = {**self.messages[index], "content": "edited"}
        elif deed == "drop" and len(self.messages) > 1:
            del self.messages[index]
        elif deed == "swap":
            self.messages[index], self.messages[0] = self.messages[0], self.messages[index]
        elif deed == "compact":
            self.messages = [user("So far: nothing.")]
        elif deed == "system":
            self.system += "!"
        elif deed == "tools":
            self.tools = [] if self.tools else [ADD]
        if self.messages[-1]["role"] == "assistant":
            self.messages.append(user("more"))

    def read(self, message: Any) -> None:
        """Keep an answer as clients do that write calls anew, trim texts and wait for the results of calls side by side."""
        content, calls = message["content"] or "", message.get("tool_calls") or []
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            changed = self.rng.choice((arguments, {**arguments, "exact": False}, {"a": float(arguments["a"]), "b": arguments["b"]}))
            call["function"]["arguments"] = json.dumps(changed, indent=1)
        if calls or content.strip():
            content = self.rng.choice((content, f"{content.strip()} \n", "" if calls else content))
        thought = (
            {"reasoning_content": message["reasoning_content"]} if message.get("reasoning_content") and self.rng.choice((0, 1)) else {}
        )
        self.messages.append({"role": "assistant", "content": content, **thought, **({"tool_calls": calls} if calls else {})})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in calls]
        self.messages += self.rng.sample(results, len(results)) or [user("more")]

    def body(self, messages: Any = None) -> dict[str, Any]:
        history = [{"role": "system", "content": self.system}, *(messages or self.messages)]
        stream = self.rng.random() < 0.5
        return {"model": "m", "messages": history, "stream": stream, **({"tools": self.tools} if self.tools else {})}

    async def ask(self, body: dict[str, Any], *, leaves: bool = False) -> Any:
        try:
            request = chat_completions.parse(body)
            exchange: Exchange = self.session.begin(json.dumps(body).encode(), request, "")
            exchange.clients += 1
            if leaves:
                if self.rng.random() < 0.5:  # else before the graph has seen the request
                    await asyncio.sleep(0)
                exchange.begun = request.stream and self.rng.random() < 0.5
                self.session.leave(exchange)
                await asyncio.wait({exchange.task})
                return None
            answer = await exchange.task
        except ApiError:
            return None
        exchange.delivered = self.rng.random() < 0.9
        self.session.leave(exchange)
        return chat_completions.render(answer, exchange.request)["choices"][0]["message"] if exchange.delivered else None


async def play(family: str, deeds: list[str], seed: int) -> None:
    rng, codec = random.Random(seed), CODECS[family]
    samples: dict[str, tuple[GenerationRequest, list[int]]] = {}

    def answer(request: GenerationRequest) -> list[int]:
        text = rng.choice(TEXTS)
        ids = codec.encode_text(text)[: rng.choice((5, 500))]
        ids = [*ids, *codec.turn_end_ids] if len(ids) != 5 else ids
        samples[request.request_id] = request, ids[: request.sampling.max_tokens]
        return ids

    engine = ScriptedEngine(answer=answer, max_model_len=3000, delay=lambda request: rng.choice((0.0, 0.001)))
    engine.end_token_ids = tuple(codec.turn_end_ids)
    await engine.start()
    group_request = GroupRequest(group_id=0, task=TASK, n_samples_per_prompt=1, version=0)
    recorder = Recorder("e", engine=engine, codec=codec, settings=SETTINGS, seed_of=turn_seed(group_request, 0, 0))
    log, parser = RequestLog(), JsonAnswerParser()
    session = EndpointSession(recorder, parser=parser, max_requests=1000, log=log)
    session.linger_s = 0.0
    agent = Agent(session, rng)
    for deed in deeds:
        await agent.act(deed)
    await session.end()
    check(recorder, samples)
    limits = EngineLimits.of(engine)
    written = json.loads(
        encode({"episode_id": "e", **log.record([exchange.end() for exchange in session.exchanges], recorder.contexts, limits)})
    )
    assert await replay_requests(written, codec=codec, settings=SETTINGS) is None


def check(recorder: Recorder, samples: dict[str, tuple[GenerationRequest, list[int]]]) -> None:
    """Compare every context with the requests and answers of its turns."""
    seen: list[str] = []
    for context in recorder.contexts:
        tokens: list[int] = []
        for turn in context.turns:
            tokens = [*([] if turn.fresh else tokens), *turn.prompt_ids.tolist()]
            matches = [
                name
                for name, (request, ids) in samples.items()
                if name not in seen and request.prompt_ids.tolist() == tokens and ids[: len(turn.token_ids)] == turn.token_ids.tolist()
            ]
            assert matches, "a turn is no sample of the engine"
            matches.sort(key=lambda name: len(samples[name][1]) != len(turn.token_ids))  # not the longer one of a client that left
            seen.append(matches[0])
            assert turn.finish_reason is FinishReason.ABORTED or len(turn.token_ids) == len(samples[matches[0]][1])
            assert turn.masked == context.masked
            assert (turn.finish_reason is FinishReason.ABORTED) <= bool(turn.masked)
            assert turn.logprobs.tolist() == [-(token % 7 + 1) / 8 for token in turn.token_ids.tolist()]
            tokens += turn.token_ids.tolist()
        assert tokens == context.tokens
    cut = [name for name, (_, ids) in samples.items() if name not in seen]
    assert all(len(samples[name][1]) < 2 for name in cut), "a sample is lost"  # an aborted answer of which nothing was sampled
    turns = recorder.turns
    if any(not turn.masked for turn in turns):
        rows = merge_turns(_trajectory(recorder))
        assert [turn for row in rows for turn in row.turns] == [turn for turn in turns if not turn.masked]
        assert [row.tokens.tolist() for row in rows] == [context.tokens for context in recorder.contexts if not context.masked]


def _trajectory(recorder: Recorder) -> Any:
    from agentrl.core.types import Status, Trajectory

    return Trajectory(trajectory_id="e", episode_id="e", group_id=0, turns=recorder.turns, status=Status.FINISHED, reward=0.0)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.lists(st.sampled_from(DEEDS), min_size=1, max_size=9), st.integers(0, 2**32))
def test_every_sampled_token_is_trained_once_or_masked_with_a_reason(family: str, deeds: list[str], seed: int) -> None:
    asyncio.run(play(family, deeds, seed))


@pytest.mark.parametrize("family", sorted(CODECS))
def test_an_agent_that_only_goes_on_has_one_branch(family: str) -> None:
    for seed in range(4):
        asyncio.run(_one_branch(family, seed))


async def _one_branch(family: str, seed: int) -> None:
    rng, codec = random.Random(seed), CODECS[family]
    engine = ScriptedEngine(answer=lambda request: [*codec.encode_text(rng.choice(TEXTS)), *codec.turn_end_ids], max_model_len=20_000)
    await engine.start()
    group_request = GroupRequest(group_id=0, task=TASK, n_samples_per_prompt=1, version=0)
    recorder = Recorder("e", engine=engine, codec=codec, settings=SETTINGS, seed_of=turn_seed(group_request, 0, 0))
    session = EndpointSession(recorder, parser=JsonAnswerParser(), max_requests=1000)
    agent = Agent(session, random.Random(seed))
    agent.rng.random = lambda: 0.0
    for _ in range(12):
        await agent.act("go on")
    assert [len(context.turns) for context in recorder.contexts] == [12]
