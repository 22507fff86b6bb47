"""Recorded episodes once more: the same code, the recorded actions, and what came out differently."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from agentrl.core.differences import Difference
from agentrl.core.errors import ConfigError, EngineError, EnvLoadError
from agentrl.core.plugins import KEPT, kept_environment
from agentrl.core.protocols import EngineLimits, GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, GroupRequest, Status, Task, Trajectory, Turn
from agentrl.engine.parsers import fit_parser
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.given import PREFIX, SOURCE
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.plan import DataConfig
from agentrl.flow.checkpoint import read_inputs
from agentrl.inspect.compare import INTERRUPTED, Records, Replay, Verdict, replay_difference
from agentrl.inspect.directory import REQUESTS, RunDirectory
from agentrl.inspect.requests import replay_requests
from agentrl.resolve.inputs import Inputs, read_code, shown_changes
from agentrl.resolve.parts import episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import make_codec as make_codec_of
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.group import Member, make_member
from agentrl.rollout.observers import SamplerEngine, written_turn
from agentrl.rollout.records import inexact_parts, recorded_group_request, recorded_limits, recorded_turn
from agentrl.rollout.tasks import context_length, open_tasks
from agentrl.suites.load import load_agent

_log = logging.getLogger(__name__)

OFFLINE = "from the recorded requests, without the agent"
CHANGED = "the endpoint, the chat template, the parsers or the settings are not those of the run"


class RecordedEngine(SamplerEngine):
    """An engine that gives each request of one episode the recorded tokens; `exhausted`: a turn was asked for that is not recorded."""

    def __init__(self, turns: Mapping[str, Sequence[Turn]], limits: EngineLimits) -> None:
        super().__init__(self._recorded, max_model_len=limits.max_model_len, end_token_ids=limits.end_token_ids)
        self._turns = {(agent, turn.number if not agent else own): turn for agent in turns for own, turn in enumerate(turns[agent])}
        self.exhausted = False

    async def _recorded(self, request: GenerationRequest) -> Generation:
        agent, number = request.session.rpartition("-")[2], int(request.request_id.rpartition("-")[2])
        # Without named agents, the last part of the session's name is no agent.
        turn = self._turns.get((agent, number)) or self._turns.get(("", number))
        if turn is None:
            self.exhausted = True
            raise EngineError("nothing more was recorded")
        return Generation(token_ids=turn.token_ids, logprobs=turn.logprobs, versions=turn.versions, finish_reason=turn.finish_reason)


class Replayer:
    """Replays records of one run.

    Args:
        agent: The environment.
        settings: Settings of the run's episodes.
        make_codec: Makes a codec for an engine that ends turns with certain tokens.
        find_task: Finds a task by its id, for values that a record could not hold.
        limits: Facts about the engine, for records that do not have them.
        find_log: Finds the log of the requests of an episode by its name; an episode that has one is not run again: its requests are.
        has_requests: False if requests are not to be driven again, so that every episode is run again.
    """

    def __init__(
        self,
        agent: AgentSpec,
        settings: EpisodePlan,
        *,
        make_codec: Callable[[tuple[int, ...]], ChatCodec],
        find_task: Callable[[str], Task | None],
        limits: EngineLimits,
        find_log: Callable[[str], Mapping[str, Any] | None] = lambda name: None,
        has_requests: bool = False,
    ) -> None:
        self._agent, self._settings, self._limits = agent, settings, limits
        # Nearly all records of a run have the same end tokens, so one codec serves them.
        self._make_codec, self._find_task = cache(make_codec), find_task
        self._find_log, self._has_requests = find_log, has_requests
        self._sessions = open_sessions(agent, settings.env)

    async def replay(self, records: Records) -> Replay:
        """Replay one episode from its lines of ``trajectories.jsonl``."""
        if self._has_requests and (log := self._find_log(str(records[0].get("episode_id")))) is not None:
            return await self._replay_requests(records, log)
        reason = next(filter(None, map(not_replayable, records)), "")
        if reason:
            return Replay(records=records, verdict=Verdict.SKIPPED, reason=reason)
        try:
            group_request, lost = self._group_request(records[0])
            difference = await self._difference(records, group_request)
        except (KeyError, TypeError, ValueError, SyntaxError) as error:
            said, name = str(error), type(error).__name__
            reason = said if said.startswith("its executor") else f"its record cannot be used: {name}: {said}"
            return Replay(records=records, verdict=Verdict.SKIPPED, reason=reason)
        if difference is None:
            status = records[0]["status"]
            return Replay(records=records, verdict=Verdict.SAME, reason=f"up to its end by {status}" if status in INTERRUPTED else "")
        if lost:
            lost = f"the task's {lost} could not be recorded exactly, and the run's tasks do not hold it"
        return Replay(records=records, verdict=Verdict.DIFFERS, difference=difference, reason=lost)

    async def _replay_requests(self, records: Records, log: Mapping[str, Any]) -> Replay:
        """Drive the requests of an episode again."""
        try:
            limits = recorded_limits(log)
            codec = self._make_codec(limits.end_token_ids if limits else ())
            difference = await replay_requests(log, codec=codec, settings=self._settings)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"its log of requests cannot be used: {type(error).__name__}: {error}"
            return Replay(records=records, verdict=Verdict.SKIPPED, reason=reason)
        if difference is None:
            return Replay(records=records, verdict=Verdict.SAME, reason=OFFLINE, offline=True)
        return Replay(records=records, verdict=Verdict.DIFFERS, difference=difference, reason=CHANGED, offline=True)

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

    def _group_request(self, record: Mapping[str, Any]) -> tuple[GroupRequest, str]:
        """The group request, and which parts of its task may not be what they were."""
        group_request, inexact = recorded_group_request(record), inexact_parts(record)
        if not inexact:
            return group_request, ""
        found = self._find_task(group_request.task.id)
        if found is None:
            return group_request, " and ".join(inexact)
        return replace(group_request, task=replace(found, position=group_request.task.position, epoch=group_request.task.epoch)), ""

    async def _difference(self, records: Records, group_request: GroupRequest) -> Difference | None:
        member, engine = self._member(records, group_request, {record["agent"]: _sampled(record) for record in records})
        replayed = await member.run()
        if isinstance(member, ExecutorEpisode) and engine.exhausted and records[0]["status"] not in INTERRUPTED:
            raise ValueError("its executor made a call that is not recorded: one that failed, or that it discarded")
        return replay_difference(records, replayed, penalized=self._settings.penalty.changes_rewards)

    async def changed(self, records: Records, *, label: Any = None, texts: Callable[[str], str] | None = None) -> Sequence[Trajectory]:
        """Return the trajectories of an episode as they would have been with another label, or with other texts in place of the answers.

        Raises:
            ValueError: If the episode's record holds nothing to replay.
        """
        if reason := next(filter(None, map(not_replayable, records)), ""):
            raise ValueError(reason)
        group_request, _ = self._group_request(records[0])
        if label is not None:
            group_request = replace(group_request, task=replace(group_request.task, label=label))
        turns = {record["agent"]: _sampled(record) for record in records}
        if texts is not None:
            codec = self._codec(records)
            turns = {agent: [_rewritten(turn, texts, codec) for turn in own] for agent, own in turns.items()}
        member, _ = self._member(records, group_request, turns)
        return await member.run()

    def _codec(self, records: Records) -> ChatCodec:
        return self._make_codec((recorded_limits(records[0]) or self._limits).end_token_ids)

    def _member(self, records: Records, group_request: GroupRequest, turns: Mapping[str, Sequence[Turn]]) -> tuple[Member, RecordedEngine]:
        """One episode that has yet to run, and the engine that gives it the turns of each agent."""
        engine = RecordedEngine(turns, recorded_limits(records[0]) or self._limits)
        member = make_member(
            group_request,
            int(str(records[0]["episode_id"]).rpartition("-")[2]),
            agent=self._agent,
            open_session=self._sessions.session,
            engine=engine,
            codec=self._codec(records),
            settings=self._settings,
        )
        return member, engine


def _rewritten(turn: Turn, texts: Callable[[str], str], codec: ChatCodec) -> Turn:
    """The turn of another text, which no model sampled."""
    ids = [*codec.encode_plain(texts(turn.text)), *codec.turn_end_ids]
    written = written_turn(ids, len(ids))
    return replace(
        turn, token_ids=written.token_ids, logprobs=written.logprobs, versions=written.versions, finish_reason=written.finish_reason
    )


def _sampled(record: Mapping[str, Any]) -> list[Turn]:
    """The actions to repeat; one whose answer was waited for in vain is not given again."""
    last = [record["unanswered"]] if record.get("unanswered") and record["status"] not in INTERRUPTED else []
    return [recorded_turn(turn, number) for number, turn in enumerate((*record["turns"], *last))]


def not_replayable(record: Mapping[str, Any]) -> str:
    """Return the reason that a record holds nothing to compare; "" if it can be compared."""
    if record.get("clipped"):
        return "its record was cut, because it was too long"
    status, turns = record.get("status"), record.get("turns")
    if status in (Status.CANCELLED, Status.CANCELLED_STRAGGLER):
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
        # Cancelled replays are waited for, since each has an environment to close.
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
    spec = _load(run, config.run.agent, agent)
    model = run.tokenizer_path(config.model.model)
    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)

    def make_codec(end_token_ids: tuple[int, ...]) -> ChatCodec:
        codec = make_codec_of(tokenizer, settings, end_token_ids)
        fit_parser(codec, config.endpoint)
        return codec

    limits = EngineLimits(max_model_len=config.engine.max_model_len or context_length(model) or 4096)
    settings = episode_plan(config).with_model(model)
    return Replayer(
        spec,
        settings,
        make_codec=make_codec,
        find_task=_task_finder(config.data, config.run.seed, spec),
        limits=limits,
        find_log=run.request_logs(),
        has_requests=(run.path / REQUESTS).is_file() and not agent,
    )


def _load(run: RunDirectory, named: str, agent: str) -> AgentSpec:
    own = kept_environment(named, run.path)
    if own != named and not agent:
        _log.warning("%s is not found from this folder; replaying in the run's copy of it, %s", named, own)
    try:
        spec = load_agent(agent or own)
    except EnvLoadError as error:
        if agent:
            raise
        if named.startswith(PREFIX):
            problem = f"its environment {named} was given as an object in Python code"
            remedy = f"Put its class ({run.path / SOURCE}) with its imports into a file, and name that with --agent FILE."
            raise EnvLoadError("RUN", str(run.path), problem, remedy) from error
        remedy = "Replay from the folder that the run was started in, or name the environment with --agent FILE."
        raise EnvLoadError("RUN", str(run.path), f"its environment {error.value} cannot be used: {error.problem}", remedy) from error
    if not agent and (manifest := read_inputs(run.path)):
        spec.load()
        before = Inputs.from_json(manifest)
        if changes := shown_changes(before, replace(before, code=read_code(own))):
            _log.warning("the code is not what the run ended with: %s; the run's copy of it is in %s", changes, run.path / KEPT)
    return spec


def _task_finder(data: DataConfig, seed: int, spec: AgentSpec, most: int = 50_000) -> Callable[[str], Task | None]:
    tasks: dict[str, Task] = {}

    def find(name: str) -> Task | None:
        # Read at the first record that needs it, because most records hold their task exactly.
        if not tasks:
            unshuffled = replace(data, shuffle=False)
            with suppress(ConfigError):
                tasks.update({task.id: task for task in open_tasks(unshuffled, spec, seed=seed).first(most)})
        return tasks.get(name)

    return find
