"""The session of ``agentrl play``: episodes on their own event loop, a person or a printer on the main thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.assets import tiny_model_path
from agentrl.cluster.build import build_engine, worker_environment
from agentrl.cluster.processes import ClusterPlan
from agentrl.core.errors import ConfigError, EngineError
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, GroupRequest, Task, Trajectory
from agentrl.engine.parsers import fit_parser
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.env.tasks import TaskSource
from agentrl.inspect.play_terminal import Leave, PlayScreen, Reader
from agentrl.rollout.codecs import let_see, make_codec
from agentrl.rollout.endpoint.answers import JSON_PARSER
from agentrl.rollout.group import Member, make_member
from agentrl.rollout.observers import ResetEvent, SampleEvent, SamplerEngine, StepEvent, WatchedEngine, WatchedSession, written_turn
from agentrl.track.text import Screen

T = TypeVar("T")

SEARCHED = 100_000
CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """The episode waits: for a person's turn, or for leave to sample one."""

    request: GenerationRequest
    answer: asyncio.Future[list[int]]


def task_named(source: TaskSource, name: str) -> Task:
    """Return the task with this id, or with this number in the environment's own order; a `ConfigError` if there is none."""
    tasks = source.first(SEARCHED)
    for task in tasks:
        if task.id == name:
            return task
    if name.isdecimal() and int(name) < len(tasks):
        return tasks[int(name)]
    last = f"{SEARCHED} and more" if len(tasks) == SEARCHED else str(len(tasks))
    examples = ", ".join(repr(task.id) for task in tasks[:3])
    raise ConfigError("--task", name, "there is no such task", f"There are {last}, from {examples} on, or give a number from 0.")


class PlaySession:
    """Plays episodes one after another; `episodes` 0: until the person leaves; `pause`: a model waits for Enter before each turn."""

    def __init__(
        self,
        plan: ClusterPlan,
        agent: AgentSpec,
        tasks: TaskSource,
        screen: Screen,
        *,
        model: bool,
        pause: bool,
        episodes: int,
        tokens: bool,
        logprobs: bool,
    ) -> None:
        self._plan, self._agent, self._tasks, self._screen, self._model = plan, agent, tasks, screen, model
        self._settings = plan.episodes
        self._options = {"model": model, "tokens": tokens, "logprobs": logprobs}
        # Looked up when it is called, because the terminal needs the codec and is made later.
        self._reader = Reader(self._tell, lambda name: self._terminal.toggle(name))
        self._pausing = model and pause and self._reader.interactive
        self._most = episodes or (1 if model and not self._pausing else 0)
        self._events: queue.SimpleQueue[_Asked | ResetEvent | SampleEvent | StepEvent | None] = queue.SimpleQueue()  # `None`: it is over
        self._loop = asyncio.new_event_loop()
        self._failed = False

    def run(self, first: str = "") -> int:
        """Play until the person leaves, beginning with the task `first` if one is named; return the exit code, 1 if an episode failed."""
        task = task_named(self._tasks, first) if first else self._tasks.draw()
        thread = threading.Thread(target=self._loop.run_forever, name="agentrl-play", daemon=True)
        thread.start()
        try:
            self._start()
            for number in itertools.count():
                task = self._after(task, self._play(task, number), number + 1)
        except Leave:
            pass
        finally:
            self._close(thread)
        return 1 if self._failed else 0

    def _start(self) -> None:
        self._sessions = open_sessions(self._agent, self._settings.env)
        self._call(self._sessions.start())
        self._engine = WatchedEngine(self._inner_engine(), self._events.put, self._leave_to_sample)
        if self._model:
            name = self._settings.model.model
            self._tell(f"Loading {'the bundled tiny model' if name == str(tiny_model_path()) else name} ...")
        self._call(self._engine.start())
        settings = self._settings
        tokenizer = load_tokenizer(settings.model.model, trust_remote_code=settings.model.trust_remote_code)
        self._codec = make_codec(tokenizer, settings, self._engine.end_token_ids)
        let_see(self._codec, settings.model, settings.images)
        fit_parser(self._codec, settings.endpoint)
        if self._codec.tool_parser != JSON_PARSER:
            self._tell(f"Tool calls are read by {self._codec.tool_parser}.")
        chat, system = settings.data.apply_chat_template, settings.data.system_prompt
        self._terminal = PlayScreen(self._screen, self._codec, system_prompt=system, chat=chat, **self._options)
        if not self._model and self._reader.interactive:
            self._tell("You are the policy: write an answer and press Enter. /help lists the commands.")

    def _inner_engine(self) -> Engine:
        if not self._model:
            return SamplerEngine(self._sample, max_model_len=self._plan.engine.engine.max_model_len)
        os.environ.update({name: value for name, value in worker_environment(self._plan.engine).items() if name not in os.environ})
        return build_engine(self._plan.engine)

    def _play(self, task: Task, number: int) -> Leave | None:
        """Play one episode; returns why it was left, if it was."""
        group_request = GroupRequest(group_id=number, task=task, n_samples_per_prompt=1, version=0)
        self._terminal.begin(f"task {task.id}" + (f"  label {task.label!r}" if not self._model and task.label is not None else ""))
        agent, engine, codec, settings = self._agent, self._engine, self._codec, self._settings

        def session() -> WatchedSession:
            return WatchedSession(self._sessions.session(), self._events.put)

        episode = make_member(group_request, 0, agent=agent, open_session=session, engine=engine, codec=codec, settings=settings)
        playing = asyncio.run_coroutine_threadsafe(self._told_when_over(episode), self._loop)
        try:
            while (event := self._events.get()) is not None:
                self._show(event)
        except BaseException as error:
            self._end(playing)
            if isinstance(error, Leave):
                return error
            raise
        trajectories = playing.result()
        self._failed |= not trajectories[0].status.trainable
        self._terminal.ended(trajectories)
        return None

    async def _told_when_over(self, episode: Member) -> tuple[Trajectory, ...]:
        try:
            return await episode.run()
        finally:
            self._events.put(None)

    def _end(self, playing: Future[tuple[Trajectory, ...]]) -> None:
        """Cancel an episode and wait until its environment is closed."""
        playing.cancel()
        with contextlib.suppress(queue.Empty):
            while self._events.get(timeout=CLOSE_TIMEOUT_S) is not None:
                pass

    def _show(self, event: _Asked | ResetEvent | SampleEvent | StepEvent) -> None:
        if isinstance(event, ResetEvent):
            self._terminal.on_reset(event)
        elif isinstance(event, SampleEvent):
            self._terminal.on_sample(event)
        elif isinstance(event, StepEvent):
            self._terminal.on_step(event)
        else:
            self._terminal.asked(event.request)
            if self._pausing:
                self._reader.pause("[Enter] ")
            ids = [] if self._model else self._typed(event.request)
            # A future of asyncio may be settled on its own loop only.
            self._loop.call_soon_threadsafe(_settle, event.answer, ids)

    def _typed(self, request: GenerationRequest) -> list[int]:
        """A person's turn as tokens, with the token that ends one."""
        agent = request.session.rpartition("-")[2]
        who = agent if agent in multi_agent_spec(self._agent.load()).agents else "you"
        text = self._reader.answer(f"{who}> ")
        if not self._reader.interactive:
            self._screen.line((f"{who}> ", "bold green"), text)
        return [*self._codec.encode_text(text), *self._codec.turn_end_ids]

    def _after(self, task: Task, left: Leave | None, played: int) -> Task:
        """Return the next task to play; `Leave` is raised if there is none."""
        while True:
            try:
                if left is None:
                    self._go_on(played)
                    left = Leave("next")
                if left.action == "quit":
                    if self._reader.ended:
                        self._tell("The input ended before the episode did.")
                    raise Leave("quit")
                if left.action == "restart":
                    return task
                return task_named(self._tasks, left.argument) if left.action == "task" else self._tasks.draw()
            except Leave as again:
                if again.action == "quit":
                    raise
                left = again
            except ConfigError as error:
                self._tell(str(error))
                left = None

    def _go_on(self, played: int) -> None:
        """After an episode: whether there is to be another."""
        if self._most and played >= self._most:
            raise Leave("quit")
        if self._reader.interactive and (self._pausing or not self._model):
            self._reader.pause("[Enter] next task, /restart, /task N, /quit ")
        elif not self._model and not self._reader.more():
            raise Leave("quit")

    async def _ask(self, request: GenerationRequest) -> list[int]:
        """On the event loop: have the main thread answer."""
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._events.put(_Asked(request, answer))
        return await answer

    async def _sample(self, request: GenerationRequest) -> Generation:
        """A person's turn, waited for without a deadline and cut to the turn's budget as a model's would be; log-probabilities are 0."""
        return written_turn(await self._ask(request), request.sampling.max_tokens)

    async def _leave_to_sample(self, request: GenerationRequest) -> None:
        if self._model:
            await self._ask(request)

    def _tell(self, text: str) -> None:
        self._screen.line((text, "dim"), prose=True)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the event loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        # Ctrl-C must not leave the work running on the other thread.
        except BaseException:
            future.cancel()
            raise

    def _close(self, thread: threading.Thread) -> None:
        # The start may have failed before these were made.
        for part in (getattr(self, "_sessions", None), getattr(self, "_engine", None)):
            if part is not None:
                with contextlib.suppress(EngineError, CancelledError, TimeoutError):
                    asyncio.run_coroutine_threadsafe(part.close(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(CLOSE_TIMEOUT_S)


def _settle(answer: asyncio.Future[list[int]], ids: list[int]) -> None:
    # The episode may have been cancelled meanwhile.
    if not answer.done():
        answer.set_result(ids)
