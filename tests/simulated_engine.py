"""Engines that only take time: all sequences of an engine share its decoding steps, which are longer the more there are."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.core.errors import EngineDeadError
from agentrl.core.protocols import EngineStats, Memory, WeightUpdate
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Status

Answer: TypeAlias = Callable[[], None]
Wanted: TypeAlias = Callable[[], bool]
Draw: TypeAlias = Callable[[random.Random], float]
"""Draws a value from a distribution."""


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """Requests of one episode."""

    reset_s: float  # seconds before the first turn
    turns: tuple[tuple[float, float], ...]  # tokens sampled in each turn, and seconds that the environment takes after it
    prompt_tokens: float = 0.0  # tokens before the first turn, which the episodes of a group share

    @property
    def num_tokens(self) -> int:
        """Tokens sampled in the whole episode."""
        return round(sum(tokens for tokens, _ in self.turns))


DrawGroup: TypeAlias = Callable[[random.Random, int], Sequence[EpisodeShape]]
"""Draws the episodes of a group of the given size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Speed of an engine: with n sequences one token of each takes ``token_s + token_s_per_sequence * n`` seconds.

    Attributes:
        token_s: Seconds of a decoding step that do not depend on how many sequences share it.
        token_s_per_sequence: Seconds that each sequence adds to it.
        max_sequences: Sequences decoded at once; further ones wait.
        prefill_token_s: Seconds that the engine computes for a token of a prompt, of a sequence that begins again, and of every sequence
            under way after a publication; nothing is decoded meanwhile.
        kv_tokens: Tokens that its cache holds. When sequences under way have filled it, the latest one gives its room to the others, waits,
            and begins again with the tokens it has.
        pause_s: Seconds without decoding for each publication.
        pause_s_per_engine: Seconds that each engine of the run adds to that, as where weights reach one after the other.
        load_s: Seconds of a publication before that, in which decoding goes on.
        lifetime_s: Seconds until an engine dies; `None`: never.
        restart_s: Seconds until another one is in its place.
    """

    token_s: float
    token_s_per_sequence: float = 0.0
    max_sequences: int = 256
    prefill_token_s: float = 0.0
    kv_tokens: float = math.inf
    pause_s_per_engine: float = 0.0
    pause_s: Draw = lambda rng: 0.0
    load_s: Draw = lambda rng: 0.0
    lifetime_s: Draw | None = None
    restart_s: float = 60.0

    def step_s(self, sequences: int) -> float:
        """Seconds of a decoding step of so many sequences."""
        return self.token_s + self.token_s_per_sequence * sequences


class World:
    """State that all engines of a simulated run share; a group asks for the same on any engine and at any time."""

    def __init__(self, draw: DrawGroup, failure_rate: float, seed: int, engines: int = 1) -> None:
        self._draw, self._failure_rate, self.seed, self.engines = draw, failure_rate, seed, engines
        self.episodes = self.peak_episodes = 0

    def group(self, group_request: GroupRequest) -> tuple[Sequence[EpisodeShape], list[bool]]:
        """The episodes of a group, and which of them fail."""
        rng = random.Random(f"{self.seed} {group_request.group_id} {group_request.attempt}")
        shapes = self._draw(rng, group_request.n_samples_per_prompt)
        return shapes, [self._failure_rate > 0.0 and rng.random() < self._failure_rate for _ in shapes]

    def began(self, count: int) -> None:
        """So many episodes began, or ended if negative."""
        self.episodes += count
        self.peak_episodes = max(self.peak_episodes, self.episodes)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request: waiting, or decoded since `began`."""

    tokens: float  # to sample from the time it begins
    prompt: float  # tokens to compute when it begins
    context: float  # tokens that it holds in the cache when it begins
    answer: Answer
    wanted: Wanted
    began: float = 0.0  # decoding steps of the engine by then


class Decoder:
    """Sequences that share decoding steps, exactly, with one timer: the next sequence to end, or the cache being full.

    Every running sequence gets one token per step, so that a sequence of k tokens ends k steps after its beginning; steps
    are counted in fractions. Prompts are computed before the next step.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model, self._loop = model, asyncio.get_running_loop()
        self._steps, self._at = 0.0, self._loop.time()  # decoding steps done, and when they were counted
        self._running: list[tuple[float, int, _Sequence]] = []  # by the step at which they end
        self._waiting: deque[_Sequence] = deque()
        self._base = 0.0  # tokens in the cache, but for one of each running sequence in each step
        self._due_prefill_s = 0.0  # seconds of prompts that are to be computed
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._paused = False
        self.busy_s = self.paused_s = self.tokens = self.prefill_s = 0.0
        self.preempted = 0

    @property
    def held(self) -> float:
        """Tokens in the cache."""
        return self._base + len(self._running) * self._steps

    def add(self, tokens: float, answer: Answer, wanted: Wanted, *, prompt: float = 0.0, context: float = 0.0) -> None:
        """Sample so many tokens, then call `answer`, unless nobody wants it any more.

        `prompt` are tokens to compute before, `context` those that it then holds in the cache.
        """
        self.advance()
        self._waiting.append(_Sequence(tokens, prompt, context, answer, wanted))
        self._fill()
        self._arm()

    def pause(self, paused: bool) -> None:
        """Stop decoding, or go on."""
        self.advance()
        self._paused = paused
        self._arm()

    def recompute(self) -> None:
        """Have the keys and values of all sequences under way computed again, as after a publication."""
        self.advance()
        self._due_prefill_s += self.held * self._model.prefill_token_s
        self._arm()

    def forget(self) -> None:
        """Drop the sequences that nobody wants any more."""
        self.advance()
        for entry in [entry for entry in self._running if not entry[2].wanted()]:
            self._running.remove(entry)
            self._base -= entry[2].context - entry[2].began
        heapq.heapify(self._running)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.wanted())
        self._fill()
        self._arm()

    def _begin(self, sequence: _Sequence) -> None:
        sequence.began = self._steps
        self._base += sequence.context - sequence.began
        self._due_prefill_s += sequence.prompt * self._model.prefill_token_s
        heapq.heappush(self._running, (self._steps + sequence.tokens, next(self._numbers), sequence))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._model.max_sequences:
            if self._running and self.held + self._waiting[0].context >= self._model.kv_tokens:
                return
            self._begin(self._waiting.popleft())

    def _preempt(self) -> None:
        """Put the latest sequence back to wait."""
        entry = max(self._running, key=lambda entry: entry[1])
        self._running.remove(entry)
        heapq.heapify(self._running)
        sequence = entry[2]
        self._base -= sequence.context - sequence.began
        sequence.context += self._steps - sequence.began
        sequence.tokens, sequence.prompt = max(0.0, entry[0] - self._steps), sequence.context
        self._waiting.appendleft(sequence)
        self.preempted += 1

    def advance(self) -> None:
        """Bring the counters up to now."""
        now = self._loop.time()
        passed, self._at = now - self._at, now
        if self._paused:
            self.paused_s += passed
        elif self._running:
            self.busy_s += passed
            computed = min(passed, self._due_prefill_s)
            self._due_prefill_s -= computed
            self.prefill_s += computed
            steps = (passed - computed) / self._model.step_s(len(self._running))
            self._steps += steps
            self.tokens += steps * len(self._running)

    def _steps_left(self) -> float:
        """Return the decoding steps until a sequence ends or has to give its room away."""
        left = self._running[0][0] - self._steps
        if len(self._running) > 1:
            left = min(left, (self._model.kv_tokens - self.held) / len(self._running))
        return max(0.0, left)

    def _arm(self) -> None:
        if self._paused or not self._running:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        due = self._at + self._due_prefill_s + self._steps_left() * self._model.step_s(len(self._running))
        if self._timer is not None:
            if self._timer.when() <= due and not self._timer.cancelled():
                return  # it comes too early, and is then set again
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._due)

    def _due(self) -> None:
        self._timer = None
        self.advance()
        ended: list[Answer] = []
        # Steps are sums of fractions, so a sequence may seem to end a little late.
        margin = 1e-9 * max(1.0, self._steps)
        while self._running and self._running[0][0] <= self._steps + margin:
            sequence = heapq.heappop(self._running)[2]
            self._base -= sequence.context - sequence.began
            ended.append(sequence.answer)
        if not ended:
            while len(self._running) > 1 and self.held + margin * len(self._running) >= self._model.kv_tokens:
                self._preempt()
        else:
            self._fill()
        self._arm()
        # Answers come last, because they may add sequences, for which the timer is set again.
        for answer in ended:
            answer()


class _Episodes:
    """The episodes of one group, side by side on one engine; `done` is set when the last has ended."""

    def __init__(self, worker: SimulatedWorker, shapes: Sequence[EpisodeShape]) -> None:
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.started_s = self._loop.time()
        self.oldest, self.newest = worker.version, worker.version
        self.generate_s = [0.0] * len(shapes)
        self.total_s = [0.0] * len(shapes)
        self._left = len(shapes)
        for index, shape in enumerate(shapes):
            self._later(shape.reset_s, lambda index=index, shape=shape: self._turn(index, shape, 0))  # type: ignore[misc]

    def wanted(self) -> bool:
        return not self.done.done()

    def _later(self, seconds: float, what: Answer) -> None:
        if seconds > 0.0:
            self._loop.call_later(seconds, what)
        else:
            what()

    def _turn(self, index: int, shape: EpisodeShape, number: int) -> None:
        if not self.wanted():
            return
        if number == len(shape.turns):
            self.total_s[index] = self._loop.time() - self.started_s
            self._left -= 1
            if not self._left:
                self.newest = self._worker.version
                self.done.set_result(None)
            return
        tokens, env_s = shape.turns[number]
        asked_s = self._loop.time()

        def sampled() -> None:
            self.generate_s[index] += self._loop.time() - asked_s
            self._later(env_s, lambda: self._turn(index, shape, number + 1))

        held = shape.prompt_tokens + sum(before for before, _ in shape.turns[:number])
        prompt = shape.prompt_tokens if index == number == 0 else 0.0  # the others find it in the cache
        self._worker.decoder.add(tokens, sampled, self.wanted, prompt=prompt, context=held)


class SimulatedWorker:
    """A rollout worker whose engine and environments only take time; see `agentrl.core.protocols.RolloutWorker`.

    Args:
        model: How fast its engine is.
        world: What the engines share.
        number: Of the engine; part of its seed.
        life: How often it was replaced before.
    """

    def __init__(self, model: EngineModel, world: World, *, number: int = 0, life: int = 0) -> None:
        self._model, self._world, self._number, self._life = model, world, number, life
        self._rng = random.Random(f"{world.seed} engine {number} {life}")
        self._groups: set[_Episodes] = set()
        self._dead = False
        self.version = 0
        self.decoder = Decoder(model)
        if model.lifetime_s is not None:
            asyncio.get_running_loop().call_later(model.lifetime_s(self._rng), self._die)

    async def start(self) -> None:
        """Load nothing."""

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, GroupSummary]:
        """Play the episodes that are drawn for the group."""
        if self._dead:
            raise EngineDeadError("simulated: it is dead")
        shapes, failed = self._world.group(group_request)
        group = _Episodes(self, shapes)
        self._groups.add(group)
        self._world.began(len(shapes))
        try:
            await group.done
        finally:
            self._groups.discard(group)
            self._world.began(-len(shapes))
            if not group.done.done() or group.done.cancelled() or group.done.exception() is not None:
                group.done.cancel()
                self.decoder.forget()
        summary = _summary(group_request, group, shapes, failed)
        return summary, summary

    async def load_weights(self, update: WeightUpdate) -> int:
        """Take the time of a publication."""
        await asyncio.sleep(self._model.load_s(self._rng))
        self.decoder.pause(True)
        await asyncio.sleep(self._model.pause_s(self._rng) + self._model.pause_s_per_engine * self._world.engines)
        self.version = update.version
        self.decoder.recompute()
        self.decoder.pause(False)
        return self.version

    async def sleep(self, level: int) -> None:
        """Stop decoding; memory is not simulated."""
        self.decoder.pause(True)

    async def wake(self, *parts: Memory) -> None:
        """Decode again."""
        if "kv_cache" in parts:
            self.decoder.pause(False)

    async def stats(self) -> EngineStats:
        """Counters on virtual time."""
        decoder = self.decoder
        decoder.advance()
        now = asyncio.get_running_loop().time()
        fault = "simulated: it is dead" if self._dead else ""
        return EngineStats(busy_s=decoder.busy_s, clock_s=now, tokens=round(decoder.tokens), paused_s=decoder.paused_s, fault=fault)

    async def successor(self) -> SimulatedWorker:
        """The worker that takes this one's place, after the time that takes."""
        await asyncio.sleep(self._model.restart_s)
        return SimulatedWorker(self._model, self._world, number=self._number, life=self._life + 1)

    async def close(self) -> None:
        """Do nothing: no resource is held."""

    def _die(self) -> None:
        self._dead = True
        for group in list(self._groups):
            if not group.done.done():
                group.done.set_exception(EngineDeadError("simulated: it died"))


def _summary(group_request: GroupRequest, group: _Episodes, shapes: Sequence[EpisodeShape], failed: Sequence[bool]) -> GroupSummary:
    """Return the summary that a real worker would send for the group; rewards alternate between 0 and 1."""
    members = tuple(
        MemberSummary(
            status=Status.ENV_ERROR if broken else Status.FINISHED,
            reward=None if broken else float(index % 2),
            score=None if broken else float(index % 2),
            num_tokens=shape.num_tokens,
            num_prompt_tokens=0,
            num_turns=len(shape.turns),
            truncated=False,
            error="simulated" if broken else None,
            timings={"generate_s": generate_s, "env_s": total_s - generate_s, "total_s": total_s},
        )
        for index, (shape, broken, generate_s, total_s) in enumerate(zip(shapes, failed, group.generate_s, group.total_s, strict=True))
    )
    versions = (group.oldest, group.newest) if any(m.trainable for m in members) else None
    return GroupSummary(group_id=group_request.group_id, members=members, versions=versions, seconds=max(group.total_s))
