"""Episodes of black-box agents against a scripted model: the requests that they send, the branches that these open, and what fails."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import Any, cast

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.learning import policy_row
from agentrl.check.play import UNLIMITED, PolicyInput, TextPolicy
from agentrl.check.policies import label_text, standard_policies
from agentrl.check.results import rule_of, spread
from agentrl.config.sections import changed
from agentrl.core.errors import EnvError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Generation, GroupRequest, Status, Task, Trajectory, Turn
from agentrl.env.agent import AgentClass, StepResult
from agentrl.env.black_box import BlackBoxSession, ModelEndpoint
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import AnswerParser
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.neutral import ChatRequest, Json
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.observers import SamplerEngine, written_turn

MAX_REQUESTS = 100
"""Requests of one episode; whoever sends more does not end."""
SHOWN_REQUESTS = 20
SHOWN_CHARS = 60
FIRST_LINE = 300
MAX_DEPTH = 8
"""Objects within objects of a value that is made of a schema."""
TOOLS = "tools, then label"


@dataclass(slots=True, kw_only=True)
class PlayedAgent:
    """One episode of the agent."""

    task: Task
    policy: str
    episode: BlackBoxEpisode
    session: CheckedSession
    trajectories: Sequence[Trajectory]

    @property
    def good(self) -> bool:
        """True if it could be trained."""
        return self.trajectories[0].status.trainable

    @property
    def finished(self) -> bool:
        """True if the agent ended the episode."""
        return self.trajectories[0].status is Status.FINISHED

    @property
    def turns(self) -> list[Turn]:
        """Turns of all branches."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]

    @property
    def reward(self) -> float:
        """Reward of the episode; of branches with rewards of their own, the mean."""
        return fmean(trajectory.reward or 0.0 for trajectory in self.trajectories)

    @property
    def score(self) -> float:
        """Score of the episode, as `reward`."""
        return fmean(trajectory.score or 0.0 for trajectory in self.trajectories)


class CheckedSession(BlackBoxSession):
    """A session that keeps the error of user code."""

    error: EnvError | None = None

    async def run(self, task: Task, llm: ModelEndpoint, timeout_s: float) -> StepResult:
        """As `BlackBoxSession.run`."""
        try:
            return await super().run(task, llm, timeout_s)
        except EnvError as error:
            self.error = error
            raise


class ScriptedModel:
    """Answers the requests of one episode as a policy says; the policy `TOOLS` first calls each tool once."""

    def __init__(self, codec: ChatCodec, parser: AnswerParser, task: Task, policy: TextPolicy, *, seed: int, index: int) -> None:
        self._codec, self._parser, self._task, self._policy, self._index = codec, parser, task, policy, index
        # The seed is a text, which `Random` hashes alike in every process; it accepts no tuples.
        self._rng = Random(f"{seed} {policy.name} {task.id} {index}")
        self._called: set[str] = set()
        self.episode: BlackBoxEpisode | None = None

    async def sample(self, request: GenerationRequest) -> Generation:
        """The tokens of the answer to a request of the engine."""
        number = int(request.request_id.rpartition("-")[2])
        assert self.episode is not None
        # Requests of one agent may overlap, so the number of the engine's request says which of them is asked.
        asked = next(exchange.request for exchange in self.episode.session.exchanges if exchange.sample == number)
        ids = await self.answer(asked, number)
        return written_turn([*ids, *self._codec.turn_end_ids], request.sampling.max_tokens)

    async def answer(self, asked: ChatRequest, number: int) -> list[int]:
        """The tokens of the answer to a request of the agent, without those that end the turn."""
        tool = self._next_tool(asked)
        if tool is not None:
            self._called.add(tool["function"]["name"])
            # Templates may write calls with control tokens, so a call is encoded with them; other answers are plain text.
            return self._codec.encode_text(self.call(tool))
        if asked.constraint is not None:
            return self._codec.encode_plain(json.dumps(value_of(asked.constraint.schema, self._task)))
        return self._codec.encode_plain(self._policy.act(self._given(asked, number)) or "")

    def _next_tool(self, asked: ChatRequest) -> Json | None:
        """The tool to call: one that the request forces, or, for the policy `TOOLS`, the next that was not called."""
        wanted = asked.constraint
        if wanted is not None and wanted.must_call:
            return next(tool for tool in asked.tools if wanted.tool in ("", tool["function"]["name"]))
        if self._policy.name != TOOLS or not asked.calls_tools:
            return None
        return next((tool for tool in asked.tools if tool["function"]["name"] not in self._called), None)

    def call(self, tool: Json) -> str:
        """A call with arguments that the schema of the tool allows."""
        return self.written([call_of(tool, self._task)], [tool])

    def written(self, calls: Sequence[Json], tools: Sequence[Json]) -> str:
        """Calls as JSON; if the parser does not take that, in the form of the chat template."""
        plain = "\n".join(map(call_text, calls))
        if self._parser.parse(plain, tools).calls:
            return plain
        return self._codec.call_text([{"type": "function", "function": call} for call in calls]) or plain

    def _given(self, asked: ChatRequest, number: int) -> PolicyInput:
        texts = [message["content"] for message in asked.messages]
        first = next((message["content"] for message in asked.messages if message["role"] == "user"), texts[0])
        return PolicyInput(self._task, number, texts[-1], first, self._rng, self._index)


async def check_black_box(context: Context) -> None:
    """Play the agent with every policy, and report failures, requests and branches."""
    tools = TextPolicy(TOOLS, lambda given: label_text(given.task.label))
    policies = [tools, *standard_policies(cast("Any", context.cls), context.tasks)]
    played: list[PlayedAgent] = []
    server = EndpointServer(context.settings.endpoint)
    tasks = enumerate(spread(context.tasks, context.settings.check.episodes))
    try:
        for (index, task), policy in itertools.product(tasks, policies):
            if why := _why_stop(context, played):
                context.report.skipped.append(f"some of the policies' episodes: {why}")
                break
            played.append(await play(context, server, task, policy, index))
            find_problems(context, played[-1])
    finally:
        await server.close()
    for policy in policies:
        if own := [one for one in played if one.policy == policy.name]:
            context.report.policies.append(policy_row(policy.name, own))
    context.report.requests = requests_of(played)


def _why_stop(context: Context, played: Sequence[PlayedAgent]) -> str:
    if sum(one.episode.session.limit_reached for one in played) > 1:
        return "the agent does not end"
    return NO_TIME if context.left() <= 0 else ""


async def play(context: Context, server: EndpointServer, task: Task, policy: TextPolicy, index: int) -> PlayedAgent:
    """Play one episode from beginning to end."""
    codec = context.player.codec
    model = ScriptedModel(codec, codec.parser, task, policy, seed=context.settings.run.seed, index=index)
    return await play_model(context, server, task, model, name=policy.name, index=index)


async def play_model(
    context: Context,
    server: EndpointServer,
    task: Task,
    model: ScriptedModel,
    *,
    name: str,
    index: int = 0,
    cls: AgentClass | None = None,
    max_model_len: int = UNLIMITED,
    **changes: Any,
) -> PlayedAgent:
    """Play one episode in which a scripted model answers; `cls` stands in for the agent's class, and `changes` are of settings."""
    # A program that imports a suite takes as long again as when its tasks were listed, which is not the time of the user's code.
    patience_s = context.settings.check.timeout_s + 2 * getattr(context.cls, "start_s", 0.0)
    timeout_s = min(patience_s, context.player.settings.rollout.episode_timeout_s)
    limits = {"episode_timeout_s": timeout_s, "max_requests": _max_requests(context), **changes}
    settings = changed(context.player.settings, **limits)
    session = CheckedSession(cls or context.cls, context.spec.source, settings.env)
    episode = model.episode = BlackBoxEpisode(
        GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0),
        index,
        engine=SamplerEngine(model.sample, max_model_len=max_model_len, keeps_structure=True),
        codec=context.player.codec,
        env=session,
        settings=settings,
        server=server,
    )
    return PlayedAgent(task=task, policy=name, episode=episode, session=session, trajectories=await episode.run())


def _max_requests(context: Context) -> int:
    return min(MAX_REQUESTS, context.settings.endpoint.max_requests)


def call_text(call: Json) -> str:
    """A call of a tool, by name and arguments, as a model writes it."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def call_of(tool: Json, task: Task) -> Json:
    """Return a call of a tool, with arguments of the types that its schema names."""
    schema = tool["function"].get("parameters") or {}
    arguments = value_of({**schema, "type": "object"}, task)
    return {"name": tool["function"]["name"], "arguments": arguments}


def value_of(schema: Any, task: Task, whole: Any = None, depth: int = 0) -> Any:
    """A value of the types that a schema names, with the label as its texts; `whole` is the schema that its references are of."""
    known: Json = schema if isinstance(schema, Mapping) else {}
    whole = known if whole is None else whole
    for fixed in ("const", "default"):
        if fixed in known:
            return known[fixed]
    if known.get("enum"):
        return known["enum"][0]
    inner = known.get("anyOf") or known.get("oneOf") or ([_referred(str(known["$ref"]), whole)] if "$ref" in known else [])
    # Schemas may refer to themselves, so the depth is bounded.
    if inner and depth < MAX_DEPTH:
        return value_of(inner[0], task, whole, depth + 1)
    if known.get("type") == "object" and depth < MAX_DEPTH:
        return {name: value_of(kind, task, whole, depth + 1) for name, kind in (known.get("properties") or {}).items()}
    kinds: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    return kinds.get(str(known.get("type")), label_text(task.label))


def _referred(reference: str, whole: Any) -> Any:
    """The part of a schema that ``#/a/b`` refers to."""
    for name in reference.removeprefix("#").strip("/").split("/"):
        whole = whole.get(name) if isinstance(whole, Mapping) and name else whole
    return whole


def requests_of(played: Sequence[PlayedAgent]) -> dict[str, Any]:
    """Everything about the agent's requests that the report shows, in JSON's own types."""
    counts = Counter[str]()
    for one in played:
        counts.update({name: int(value) for name, value in one.trajectories[0].metrics.items() if name.startswith("endpoint/")})
    asked = [exchange for one in played for exchange in one.episode.session.exchanges]
    tokens = sorted(exchange.task.result().prompt_tokens for exchange in asked if exchange.answered)
    prefix = "endpoint/branches/"
    return {
        "episodes": len(played),
        "requests": counts["endpoint/requests"],
        "refused": counts["endpoint/refused"],
        "abandoned": counts["endpoint/abandoned"],
        "streamed": sum(exchange.request.stream for exchange in asked),
        "tools": sorted({tool["function"]["name"] for exchange in asked for tool in exchange.request.tools}),
        "prompt_tokens": [tokens[0], round(median(tokens)), tokens[-1]] if tokens else [],
        "branches": {name.removeprefix(prefix).replace("_", " "): count for name, count in counts.items() if name.startswith(prefix)},
        "untrained": dict(Counter(turn.masked for one in played for turn in one.turns if turn.masked)),
        "first": _described(played[0]) if played else [],
    }


def _described(one: PlayedAgent) -> list[str]:
    """Each request of an episode in a line."""
    lines = []
    for number, exchange in enumerate(one.episode.session.exchanges[:SHOWN_REQUESTS]):
        roles = ", ".join(message["role"] for message in exchange.request.messages)
        named = f" of {exchange.branch!r}" if exchange.branch else ""
        if not exchange.answered:
            lines.append(f"{number + 1}. {roles}{named}: no answer")
            continue
        answer, place = exchange.task.result(), exchange.place
        said = f"calls {', '.join(call.name for call in answer.calls)}" if answer.calls else repr(answer.text[:SHOWN_CHARS])
        opened = place[0].reason if place is not None and place[1] == 0 else ""
        why = f"opens a branch ({opened}), " if opened else ""
        lines.append(f"{number + 1}. {roles}{named}: {why}{answer.prompt_tokens} tokens, answered {said}")
    left = len(one.episode.session.exchanges) - SHOWN_REQUESTS
    return [*lines, f"and {left} more"] if left > 0 else lines


def find_problems(context: Context, one: PlayedAgent) -> None:
    """Report what was wrong with an episode."""
    trajectory, session = one.trajectories[0], one.episode.session
    which = f"(task {one.task.id!r}, policy {one.policy!r})"
    if session.last_refusal is not None:
        context.found("request-refused", "run", f"{session.last_refusal.status}: {session.last_refusal.message[:FIRST_LINE]} {which}")
    # An episode that reached the limit counts as truncated, which is trainable, so this comes before the test of success.
    if session.limit_reached:
        context.found("asks-forever", "run", f"more than {_max_requests(context)} requests {which}")
    elif one.good:
        return
    elif one.session.error is not None:
        context.found(rule_of(one.session.error, "run"), "run", f"{str(one.session.error).partition(chr(10))[0][:FIRST_LINE]} {which}")
    elif trajectory.status is Status.TIMEOUT:
        context.found("timeout", "run", f"{trajectory.error} {which}")
    elif not session.counts["requests"] or not any(exchange.answered for exchange in session.exchanges):
        context.found("no-request", "run", f"{trajectory.error} {which}")
    else:
        context.found("run-raises", "run", f"{trajectory.error} {which}")
