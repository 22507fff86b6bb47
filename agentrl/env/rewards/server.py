"""Reward models behind HTTP; episodes that end at about the same time share one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl

import anyio

from agentrl.core.errors import ConfigError, EnvLoadError, EnvResultError, RemoteError, RewardError
from agentrl.env.agent import AgentInstance, StepResult, StepState
from agentrl.env.remote.wire import check_url, encode_json
from agentrl.env.rewards.function import RemoteReward, Reward, read_answer, reward_environment

if TYPE_CHECKING:
    from agentrl.env.remote.http import JsonClient

JOIN_S = 0.005
"""Time that a request waits for further episodes to join it."""
MAX_ANSWER = 2**18
"""Maximum size of the answer for a whole batch, bytes."""

Item: TypeAlias = tuple[str, str, Any]
"""Query, prompt, label."""


class ServerReward(RemoteReward):
    """Servers in OpenRLHF's form: POST ``{"query", "prompts", "labels"}`` with lists, answered like a `reward_func`.

    Every request has a deadline; busy and broken servers are tried again; a final failure is a `RewardError`. If a server
    refuses a batch or its answer cannot be used, each item is sent once more alone, so that one bad item does not spoil
    the others.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float, batch_size: int) -> None:
        in_time = 0.9 * timeout_s  # so that the client, which knows the reason, gives up first
        super().__init__([check_url(url) for url in urls], timeout_s=in_time, attempt_timeout_s=timeout_s / 2, max_bytes=MAX_ANSWER)
        self._where = ", ".join(self._urls)
        self._timeout_s, self._batch_size = timeout_s, batch_size
        self._waiting: list[tuple[Item, asyncio.Future[StepResult]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def judge(self, state: StepState) -> StepResult:
        """As `Reward.judge`; `RewardError` if no server gave a usable answer in time, `EnvResultError` if this entry is unusable."""
        item = (state.observation_text + state.action_text, state.observation_text, state.label)
        try:
            # Checked before it joins a batch: one label that is not JSON would fail the requests of all others.
            encode_json(item)
        except RemoteError as error:
            raise RewardError(f"{self._where}: label = {state.label!r:.80}: {error}") from error
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self._batch_size:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(JOIN_S, self._send)
        return await future

    def _send(self) -> None:
        """Start a request for all waiting items."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wanted = [(item, future) for item, future in self._waiting if not future.done()]
        self._waiting = []
        if wanted and self._client is not None:
            self._start(self._run(self._client, wanted), "reward batch")

    async def _run(self, client: JsonClient, wanted: list[tuple[Item, asyncio.Future[StepResult]]]) -> None:
        """Answer the futures of a batch. Waits for the servers; unblocked by the deadline or by `close`."""
        items = [item for item, _ in wanted]
        results: Sequence[StepResult | Exception] = [RewardError(f"{self._where}: no usable answer within {self._timeout_s:g} s")] * len(
            items
        )
        try:
            with anyio.move_on_after(self._timeout_s):
                results = await self._judge(client, items)
        except Exception as error:  # a bug must reach those who wait, or they would wait for ever
            results = [error] * len(items)
        for (_, future), result in zip(wanted, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _judge(self, client: JsonClient, items: list[Item]) -> Sequence[StepResult | Exception]:
        queries, prompts, labels = zip(*items, strict=True)
        try:
            answer = await client.post({"query": queries, "prompts": prompts, "labels": labels})
            return read_answer(answer, len(items), self._where, strict=False)
        except RemoteError as error:
            if error.infrastructure or len(items) == 1:
                return [RewardError(str(error))] * len(items)
        except EnvResultError as error:
            if len(items) == 1:
                return [error]
        apart = await asyncio.gather(*(self._judge(client, [item]) for item in items))
        return [result for results in apart for result in results]


def remote_reward(*urls: str, timeout_s: float = 45.0, batch_size: int = 64) -> Reward:
    """Return the reward of a reward model behind HTTP in OpenRLHF's form, for use alone or in `combine_rewards`.

    Args:
        urls: Equivalent servers, asked in rotation.
        timeout_s: Deadline of an answer, with all attempts.
        batch_size: Maximum number of episodes in one request.

    Raises:
        ConfigError: If an address cannot be used.
    """
    return ServerReward(urls, timeout_s=timeout_s, batch_size=batch_size)


def load_reward_servers(spec: str) -> type[AgentInstance]:
    """Return the environment class that ``reward:URL[,URL...][#timeout_s=...&batch_size=...]`` names."""
    urls, _, fragment = spec.partition(":")[2].partition("#")
    options = dict(parse_qsl(fragment))
    try:
        timeout_s, batch_size = float(options.pop("timeout_s", 45)), int(options.pop("batch_size", 64))
        if options:
            raise ValueError(f"there is no option {next(iter(options))!r}")
        return reward_environment(remote_reward(*urls.split(","), timeout_s=timeout_s, batch_size=batch_size), "RewardServer")
    except ConfigError as error:
        raise EnvLoadError("--remote-rm-url", error.value, error.problem, error.remedy) from error
    except ValueError as error:
        raise EnvLoadError("--agent", spec, str(error), "Write reward:URL#timeout_s=45&batch_size=64.") from error
