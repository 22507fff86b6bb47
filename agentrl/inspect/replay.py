"""Recorded episodes once more: the same code, the recorded actions, and what came out differently."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias

from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError, EngineError, EnvLoadError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, Status, Task, Ticket, Turn
from agentrl.engine.parsers import answer_parser
from agentrl.env.given import PREFIX, SOURCE
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.load import AgentSpec, load_agent, original_or_copy
from agentrl.inspect.compare import INTERRUPTED, Difference, first_difference
from agentrl.inspect.directory import REQUESTS, RunDirectory
from agentrl.inspect.requests import replay_requests
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import AnswerParser, has_own_form
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.group import make_member
from agentrl.rollout.observers import SamplerEngine
from agentrl.rollout.penalties import has_penalties
from agentrl.rollout.records import EngineLimits, inexact_parts, recorded_limits, recorded_ticket, recorded_turn
from agentrl.rollout.settings import EpisodeSettings, episode_settings
from agentrl.rollout.tasks import context_length, open_tasks

_log = logging.getLogger(__name__)

OFFLINE = "from the recorded requests, without the agent"
CHANGED = "the endpoint, the chat template, the parsers or the settings are not those of the run"

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""Records of one episode: one, or one for each of its agents."""


class Verdict(StrEnum):
    """Result of a replay."""

    SAME = "same"
    """Every observation, reward, the score and the end were as recorded."""
    DIFFERS = "differs"
    """Something was not."""
    SKIPPED = "skipped"
    """There was nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The outcome of one replay; `reason` tells why it was skipped, or what limits or explains the outcome."""

    records: Records
    verdict: Verdict
    difference: Difference | None = None
    reason: str = ""
    offline: bool = False  # recorded requests were driven through the endpoint, and no agent was run

    @property
    def episode_id(self) -> str:
        """Name of the episode."""
        return str(self.records[0].get("episode_id", "?"))


class RecordedEngine(SamplerEngine):
    """An engine that gives each request of one episode the recorded tokens; `exhausted`: a turn was asked for that is not recorded."""

    def __init__(self, turns: Mapping[str, Sequence[Turn]], limits: EngineLimits) -> None:
        super().__init__(self._recorded, max_model_len=limits.max_model_len, end_token_ids=limits.end_token_ids)
        self._turns = {(agent, turn.number if not agent else own): turn for agent in turns for own, turn in enumerate(turns[agent])}
        self.exhausted = False

    async def _recorded(self, request: GenerationRequest) -> Generation:
        agent, number = request.session.rpartition("-")[2], int(request.request_id.rpartition("-")[2])
        turn = self._turns.get((agent, number)) or self._turns.get(("", number))
        if turn is None:
            self.exhausted = True
            raise EngineError("nothing more was recorded")
        return Generation(token_ids=turn.token_ids, logprobs=turn.logprobs, versions=turn.versions, finish_reason=turn.finish_reason)


class RequestReplayer:
    """Replays episodes of black-box agents by their logs of requests, which `find` gives by the name of the episode."""

    def __init__(
        self,
        find: Callable[[str], Mapping[str, Any] | None],
        settings: EpisodeSettings,
        *,
        make_codec: Callable[[Sequence[int]], ChatCodec],
        parser: AnswerParser,
    ) -> None:
        self._find, self._settings, self._parser, self._make_codec = find, settings, parser, cache(make_codec)

    async def replay(self, records: Records) -> Replay | None:
        """Drive the requests of an episode again; `None` if they were not recorded."""
        log = self._find(str(records[0].get("episode_id")))
        if log is None:
            return None
        try:
            limits = recorded_limits(log)
            codec = self._make_codec(limits.end_token_ids if limits else ())
            found = await replay_requests(log, codec=codec, settings=self._settings, parser=self._parser)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"its log of requests cannot be used: {type(error).__name__}: {error}"
            return Replay(records=records, verdict=Verdict.SKIPPED, reason=reason)
        if found is None:
            return Replay(records=records, verdict=Verdict.SAME, reason=OFFLINE, offline=True)
        return Replay(records=records, verdict=Verdict.DIFFERS, difference=found, reason=CHANGED, offline=True)


class Replayer:
    """Replays records of one run; `find_task` finds a task by its id, for values that a record could not hold.

    Episodes of which `requests` has a log are not run again: their requests are.
    """

    def __init__(
        self,
        agent: AgentSpec,
        settings: EpisodeSettings,
        *,
        make_codec: Callable[[Sequence[int]], ChatCodec],
        find_task: Callable[[str], Task | None],
        limits: EngineLimits,
        requests: RequestReplayer | None = None,
    ) -> None:
        self._requests = requests
        self._agent, self._settings, self._limits = agent, settings, limits
        self._make_codec, self._find_task = make_codec, find_task
        self._codecs: dict[tuple[int, ...], ChatCodec] = {}
        self._sessions = open_sessions(agent, settings.env)

    async def replay(self, records: Records) -> Replay:
        """Replay one episode from its lines of ``trajectories.jsonl``."""
        if self._requests is not None and (outcome := await self._requests.replay(records)) is not None:
            return outcome
        reason = next(filter(None, map(not_replayable, records)), "")
        if reason:
            return Replay(records=records, verdict=Verdict.SKIPPED, reason=reason)
        try:
            ticket, lost = self._ticket(records[0])
            found = await self._difference(records, ticket)
        except (KeyError, TypeError, ValueError, SyntaxError) as error:
            said, name = str(error), type(error).__name__
            reason = said if said.startswith("its executor") else f"its record cannot be used: {name}: {said}"
            return Replay(records=records, verdict=Verdict.SKIPPED, reason=reason)
        if found is None:
            status = records[0]["status"]
            return Replay(records=records, verdict=Verdict.SAME, reason=f"up to its end by {status}" if status in INTERRUPTED else "")
        if lost:
            lost = f"the task's {lost} could not be recorded exactly, and the run's tasks do not hold it"
        return Replay(records=records, verdict=Verdict.DIFFERS, difference=found, reason=lost)

    async def replay_all(self, episodes: Iterable[Records], *, jobs: int = 8) -> AsyncIterator[Replay]:
        """Yield the outcomes of many replays, `jobs` at a time; those that differ are played once more at the end, alone, to tell why."""
        doubtful: list[Replay] = []
        async for outcome in _side_by_side(self.replay, episodes, jobs):
            if outcome.verdict is Verdict.DIFFERS and not outcome.reason:
                doubtful.append(outcome)
            else:
                yield outcome
        for outcome in doubtful:
            yield await self._explained(outcome, alone=jobs == 1)

    async def start(self) -> None:
        """Load the environment where it will run; an `EnvLoadError` if it cannot be loaded there."""
        await self._sessions.start()

    async def close(self) -> None:
        """Release what the episodes shared; safe to call twice."""
        await self._sessions.close()

    async def _explained(self, outcome: Replay, *, alone: bool) -> Replay:
        again = (await self.replay(outcome.records)).difference
        if again is None and alone:
            reason = "not deterministic: a second replay gave what was recorded"
        elif again is None:
            reason = "the same when replayed alone: episodes side by side disturb each other, for example by global random state"
        elif again != outcome.difference:
            reason = "not deterministic: two replays differ from each other"
        else:
            reason = "the same difference each time: environment, tasks or settings are not those of the run"
        return replace(outcome, reason=reason)

    def _ticket(self, record: Mapping[str, Any]) -> tuple[Ticket, str]:
        """The ticket, and which parts of its task may not be what they were."""
        ticket, inexact = recorded_ticket(record), inexact_parts(record)
        if not inexact:
            return ticket, ""
        found = self._find_task(ticket.task.id)
        if found is None:
            return ticket, " and ".join(inexact)
        return replace(ticket, task=replace(found, position=ticket.task.position, epoch=ticket.task.epoch)), ""

    async def _difference(self, records: Records, ticket: Ticket) -> Difference | None:
        limits = recorded_limits(records[0]) or self._limits
        codec = self._codecs.get(limits.end_token_ids)
        if codec is None:
            codec = self._codecs[limits.end_token_ids] = self._make_codec(limits.end_token_ids)
        index = int(str(records[0]["episode_id"]).rpartition("-")[2])
        engine = RecordedEngine({record["agent"]: _sampled(record) for record in records}, limits)
        agent, session, settings = self._agent, self._sessions.session, self._settings
        member = make_member(ticket, index, agent=agent, open_session=session, engine=engine, codec=codec, settings=settings)
        replayed = await member.run()
        if isinstance(member, ExecutorEpisode) and engine.exhausted and records[0]["status"] not in INTERRUPTED:
            raise ValueError("its executor made a call that is not recorded: one that failed, or that it discarded")
        return first_difference(records, replayed, penalized=has_penalties(settings.algo))


def _sampled(record: Mapping[str, Any]) -> list[Turn]:
    """The actions to repeat; one whose answer was waited for in vain is not given again."""
    last = [record["unanswered"]] if record.get("unanswered") and record["status"] not in INTERRUPTED else []
    return [recorded_turn(turn, number) for number, turn in enumerate((*record["turns"], *last))]


def not_replayable(record: Mapping[str, Any]) -> str:
    """Return the reason that a record holds nothing to compare; "" if it can be compared."""
    if record.get("clipped"):
        return "its record was cut, because it was too long"
    status, turns = record.get("status"), record.get("turns")
    if status in (Status.CANCELLED, Status.WITHHELD):
        return "it was cancelled"
    if status in INTERRUPTED and not turns and not record.get("agent"):
        return f"it ended by {status} before its first turn was answered"
    if not isinstance(turns, list) or not record.get("task"):
        return "it is no record of an episode"
    return ""


async def _side_by_side(
    replay: Callable[[Records], Coroutine[Any, Any, Replay]], episodes: Iterable[Records], jobs: int
) -> AsyncIterator[Replay]:
    """Outcomes as they come; at most `jobs` episodes are held at a time."""
    waiting: set[asyncio.Task[Replay]] = set()
    left = iter(episodes)
    try:
        while True:
            waiting.update(asyncio.create_task(replay(records)) for records in itertools.islice(left, jobs - len(waiting)))
            if not waiting:
                return
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)


def open_replayer(run: RunDirectory, agent: str = "") -> Replayer:
    """Return the replayer of a run's episodes, in the environment `agent` or the run's own.

    Raises:
        ConfigError: If the run's settings, environment or tokenizer cannot be used.
    """
    config = run.config()
    spec = _load(run, config, agent)
    model = run.tokenizer_path(config)
    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)

    def make_codec(end_token_ids: Sequence[int]) -> ChatCodec:
        prompt, template_tools = config.data.system_prompt, has_own_form(config.endpoint)
        return ChatCodec(tokenizer, system_prompt=prompt, end_token_ids=end_token_ids, template_tools=template_tools)

    limits = EngineLimits(max_model_len=config.engine.max_model_len or context_length(model) or 4096)
    settings = episode_settings(config, model)
    requests = None
    if (run.path / REQUESTS).is_file() and not agent:
        parser = answer_parser(config.endpoint, tokenizer)
        requests = RequestReplayer(run.request_logs(), settings, make_codec=make_codec, parser=parser)
    return Replayer(spec, settings, make_codec=make_codec, find_task=_task_finder(config, spec), limits=limits, requests=requests)


def _load(run: RunDirectory, config: TrainConfig, agent: str) -> AgentSpec:
    own = original_or_copy(config.run.agent, run.path)
    if own != config.run.agent and not agent:
        _log.warning("%s is not found from this folder; replaying in the run's copy of it, %s", config.run.agent, own)
    try:
        return load_agent(agent or own)
    except EnvLoadError as error:
        if agent:
            raise
        if config.run.agent.startswith(PREFIX):
            problem = f"its environment {config.run.agent} was given as an object in Python code"
            remedy = f"Put its class ({run.path / SOURCE}) with its imports into a file, and name that with --agent FILE."
            raise EnvLoadError("RUN", str(run.path), problem, remedy) from error
        remedy = "Replay from the folder that the run was started in, or name the environment with --agent FILE."
        raise EnvLoadError("RUN", str(run.path), f"its environment {error.value} cannot be used: {error.problem}", remedy) from error


def _task_finder(config: TrainConfig, spec: AgentSpec, most: int = 50_000) -> Callable[[str], Task | None]:
    tasks: dict[str, Task] = {}

    def find(name: str) -> Task | None:
        if not tasks:
            unshuffled = replace(config, data=replace(config.data, shuffle=False))
            with suppress(ConfigError):
                tasks.update({task.id: task for task in open_tasks(unshuffled, spec).first(most)})
        return tasks.get(name)

    return find
