"""Agents of an episode that somebody else plays: another model, a service, or earlier weights of the run."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from agentrl.core.errors import EngineError, EnvError, RemoteError
from agentrl.core.paths import past_folder
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Generation, GroupRequest, Message, derive_seed
from agentrl.env.remote.completions import complete
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import make_codec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.observers import SamplerEngine, written_turn
from agentrl.rollout.partner_specs import PartnerSpec, partner_specs, past_spec, past_steps

if TYPE_CHECKING:
    from agentrl.env.remote.http import JsonClient

METRIC = "partner_step"
"""Metric of an episode: steps that the weights of its partner had been trained for."""
KEY = "OPENAI_API_KEY"

MakeEngine: TypeAlias = Callable[[str], Engine]
"""Makes an engine for the model of a directory or of the hub; it is not started."""

Ask: TypeAlias = Callable[[Sequence[Message], GenerationRequest], Awaitable[str]]
"""Returns the text that answers chat messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """One who plays an agent for a group: an engine with its codec, or a service that is asked with chat messages.

    Attributes:
        engine: Samples the turns; `None` for a service.
        codec: Its chat template and tokens.
        ask: Returns the text that answers messages.
        info: Numbers to log with the episodes.
    """

    codec: ChatCodec
    engine: Engine | None = None
    ask: Ask | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    def engine_for(self, messages: Callable[[], Sequence[Message] | None], own: Engine) -> Engine:
        """Return the engine of one conversation, whose messages so far the function tells; `own` is that of the policy."""
        if self.engine is not None:
            return self.engine

        async def sample(request: GenerationRequest) -> Generation:
            so_far = messages()
            if so_far is None or self.ask is None:
                raise EnvError("a partner that is a service reads chat messages, and this agent has read raw text")
            ids = [*self.codec.encode_plain(await self.ask(so_far, request)), *self.codec.turn_end_ids]
            return written_turn(ids, request.sampling.max_tokens)

        return SamplerEngine(sample, max_model_len=own.max_model_len, end_token_ids=self.codec.end_token_ids)


class Partners:
    """The partners of a rollout worker's groups; engines are started when a group needs them, and few are kept.

    All episodes of a group play against the same one, drawn by the run's seed and the task, so that a resumed run draws the same.
    """

    def __init__(self, settings: EpisodePlan, make_engine: MakeEngine | None) -> None:
        self._settings, self._make_engine = settings, make_engine
        self._specs = partner_specs(settings.partner)
        self._engines: OrderedDict[str, Engine] = OrderedDict()
        self._codecs: dict[str, ChatCodec] = {}
        self._users: Counter[str] = Counter()
        self._clients: dict[str, JsonClient] = {}
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def of_group(self, group_request: GroupRequest, codec: ChatCodec) -> AsyncIterator[dict[str, Partner]]:
        """Yield the partner of each agent that has one, for as long as the group is played; `codec` is that of the policy.

        Raises:
            EngineError: If a model cannot be loaded.
        """
        taken: list[str] = []
        partners: dict[str, Partner] = {}
        try:
            for spec in self._specs:
                if spec.kind == "endpoint":
                    partners[spec.agent] = self._service(spec, codec)
                elif spec.kind == "model":
                    partners[spec.agent] = await self._model(spec.where, taken)
                elif self._settings.partner_folder:
                    step, where = self._past(group_request)
                    partners[spec.agent] = await self._model(where, taken, {METRIC: float(step)}, codec)
            yield partners
        finally:
            self._users.subtract(taken)

    async def close(self) -> None:
        """Close engines and connections; safe to call twice."""
        engines, clients = [*self._engines.values()], [*self._clients.values()]
        self._engines.clear()
        self._clients.clear()
        await asyncio.gather(*(engine.close() for engine in engines), *(client.aclose() for client in clients), return_exceptions=True)

    def _past(self, group_request: GroupRequest) -> tuple[int, str]:
        settings, task = self._settings, group_request.task
        past = past_spec(settings.partner)
        steps = past_steps(group_request.version, past.every, past.pool)
        step = steps[derive_seed(settings.seed, task.id, task.epoch, "partner") % len(steps)]
        return step, str(past_folder(Path(settings.partner_folder), step)) if step else settings.model.model

    async def _model(
        self, where: str, taken: list[str], info: Mapping[str, float] | None = None, codec: ChatCodec | None = None
    ) -> Partner:
        """Return a partner with the engine of a model, started if it is not; `codec` if it is not the model's own."""
        # One at a time, as two groups that want the same model would both start it.
        async with self._starting:
            if where not in self._engines:
                await self._drop_unused()
                self._engines[where] = await self._started(where)
            self._engines.move_to_end(where)
            self._users[where] += 1
            taken.append(where)
            spoken = codec or self._codecs.get(where)
            if spoken is None:
                spoken = self._codecs[where] = await asyncio.to_thread(self._codec, where)
        return Partner(engine=self._engines[where], codec=spoken, info=info or {})

    async def _started(self, where: str) -> Engine:
        if self._make_engine is None:
            raise EngineError(f"--partner: nothing here loads the model {where}")
        engine = self._make_engine(where)
        await engine.start()
        return engine

    async def _drop_unused(self) -> None:
        """Close the engines that were not used for the longest time, as far as they are more than the pool with the next."""
        for where in [where for where in self._engines if not self._users[where]]:
            if len(self._engines) < past_spec(self._settings.partner).pool:
                return
            await self._engines.pop(where).close()

    def _codec(self, where: str) -> ChatCodec:
        settings = self._settings.with_model(where)
        tokenizer = load_tokenizer(where, trust_remote_code=settings.model.trust_remote_code)
        return make_codec(tokenizer, settings, self._engines[where].end_token_ids)

    def _service(self, spec: PartnerSpec, codec: ChatCodec) -> Partner:
        if spec.where not in self._clients:
            from agentrl.env.remote.http import HttpLimits, JsonClient  # only now: httpx takes long to import

            limit = self._settings.rollout.step_timeout_s
            self._clients[spec.where] = JsonClient([spec.where], HttpLimits(timeout_s=limit, attempt_timeout_s=limit / 2, attempts=3))
        client = self._clients[spec.where]

        async def ask(messages: Sequence[Message], request: GenerationRequest) -> str:
            sampling = request.sampling
            body = {
                "model": spec.options["model"],
                "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                **({} if sampling.seed is None else {"seed": sampling.seed % 2**31}),
                **({"stop": list(sampling.stop)} if sampling.stop else {}),
            }
            try:
                return (await complete(client, body, spec.options.get("api_key_env", KEY))).text
            except RemoteError as error:
                raise EnvError(f"--partner {spec.agent}: {error}") from error

        return Partner(codec=codec, ask=ask)
