"""A judge: a model behind an OpenAI-compatible address that reads the answer and gives it a number."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.core.errors import ConfigError, RemoteError, RewardError
from agentrl.core.types import Prompt
from agentrl.env.agent import StepResult, StepState
from agentrl.env.remote.completions import complete
from agentrl.env.remote.wire import check_url
from agentrl.env.results import bad_result
from agentrl.env.rewards.function import RemoteReward

MAX_ANSWER = 2**20
MAX_CACHED = 65_536
"""Verdicts that are kept in memory; the oldest go first."""
AGAIN = "Your reply holds no such number. Reply with the number alone."
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(slots=True)
class JudgeCounts:
    """Counts of what a judge was asked and what it cost so far, in this process."""

    calls: int = 0  # requests that were answered
    cached: int = 0  # verdicts that needed no request
    unreadable: int = 0  # replies without a number, after which the judge was asked again
    prompt_tokens: int = 0  # as the service counts them
    completion_tokens: int = 0
    cost: float = 0.0  # by the given prices


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Settings of a judge; see `judge`."""

    template: str
    model: str
    base_url: str
    api_key_env: str
    pattern: str
    low: float
    high: float
    request: Mapping[str, Any]
    timeout_s: float
    attempts: int
    cache: Path | None
    price_in: float = 0.0
    price_out: float = 0.0
    max_cost: float = math.inf
    counts: JudgeCounts = field(default_factory=JudgeCounts)


class JudgeReward(RemoteReward):
    """A reward that a model gives; see `judge`. One object serves all episodes of a process, on one event loop."""

    def __init__(self, settings: JudgeSettings) -> None:
        # Below the deadline of the verdict, so that the client, which knows the reason, gives up first.
        limits = {"timeout_s": 0.9 * settings.timeout_s, "attempt_timeout_s": settings.timeout_s / 2}
        super().__init__([settings.base_url], **limits, attempts=settings.attempts, max_bytes=MAX_ANSWER)
        self._settings, self._pattern = settings, re.compile(settings.pattern)
        self._known: OrderedDict[str, float] | None = None  # verdicts by key
        self._asking: dict[str, asyncio.Task[tuple[float, float]]] = {}  # verdicts that are being asked for, with their costs

    @property
    def counts(self) -> JudgeCounts:
        """Return a copy of the counts so far."""
        return replace(self._settings.counts)

    def open(self) -> None:
        """As `Reward.open`."""
        super().open()
        if self._known is None:
            self._known = _read_cache(self._settings.cache)

    async def judge(self, state: StepState) -> StepResult:
        """As `Reward.judge`; `RewardError` if the judge gave no number in time, `EnvResultError` if the task lacks a field."""
        settings, counts = self._settings, self._settings.counts
        text = self._filled(state)
        facts = (settings.request, settings.pattern, settings.low, settings.high, text)
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        known = self._known if self._known is not None else OrderedDict()
        was_known, spent = key in known, 0.0
        if was_known:
            known.move_to_end(key)
            value = known[key]
        else:
            asking = self._asking.get(key)
            was_known = asking is not None
            if asking is None:
                asking = self._asking[key] = self._start(self._ask(key, text), "judge")
                asking.add_done_callback(lambda task: self._asking.pop(key, None))
            # Shielded, as other episodes may wait for the same verdict when this one is cancelled.
            value, spent = await asyncio.shield(asking)
        counts.cached += was_known
        reward = (value - settings.low) / (settings.high - settings.low)
        info = {"judge/value": value, "judge/cached": float(was_known), "judge/cost": 0.0 if was_known else spent}
        return StepResult(reward, terminated=True, score=min(max(reward, 0.0), 1.0), info=info)

    def _filled(self, state: StepState) -> str:
        """The template with the fields of this answer in their places."""
        known: dict[str, Any] = {
            **state.task.metadata,
            "prompt": _plain(state.task.prompt),
            "completion": state.action_text,
            "label": state.label,
        }

        def value(found: re.Match[str]) -> str:
            if found[1] not in known:
                there = ", ".join(sorted(known))
                raise bad_result("judge", f"field {{{found[1]}}}", None, f"task {state.task.id!r} has no such column (there are {there})")
            return str(known[found[1]])

        return _FIELD.sub(value, self._settings.template)

    async def _ask(self, key: str, text: str) -> tuple[float, float]:
        """Ask until a reply holds a number, and keep it; returns it with what it cost.

        Waits for the service; unblocked by the deadline or by `close`.
        """
        settings = self._settings
        messages = [{"role": "user", "content": text}]
        reply, spent = "", 0.0
        try:
            async with asyncio.timeout(settings.timeout_s):
                for _ in range(settings.attempts):
                    reply, cost = await self._reply(messages)
                    spent += cost
                    value = self._value(reply)
                    if value is not None:
                        self._keep(key, value)
                        return value, spent
                    settings.counts.unreadable += 1
                    messages = [*messages[:1], {"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
        except TimeoutError:
            raise RewardError(f"judge {settings.model} at {settings.base_url}: no verdict within {settings.timeout_s:g} s") from None
        expected = f"no number from {settings.low:g} to {settings.high:g} ({settings.pattern!r})"
        raise RewardError(f"judge {settings.model}: {expected} in any of {settings.attempts} replies; the last was {reply!r:.200}")

    async def _reply(self, messages: list[dict[str, str]]) -> tuple[str, float]:
        """Send one request; returns the reply and what it cost."""
        settings, counts, client = self._settings, self._settings.counts, self._client
        if client is None:
            raise RewardError(f"judge {settings.model}: it is closed")
        if counts.cost >= settings.max_cost:
            raise RewardError(f"judge {settings.model}: {counts.cost:.2f} is spent, and max_cost is {settings.max_cost:g}")
        try:
            answer = await complete(client, {**settings.request, "messages": messages}, settings.api_key_env)
        except RemoteError as error:
            raise RewardError(f"judge {settings.model}: {error}") from error
        counts.calls += 1
        counts.prompt_tokens += answer.prompt_tokens
        counts.completion_tokens += answer.completion_tokens
        cost = (answer.prompt_tokens * settings.price_in + answer.completion_tokens * settings.price_out) / 1e6
        counts.cost += cost
        return answer.text, cost

    def _value(self, reply: str) -> float | None:
        """The number in a reply; `None` without one, or with one outside the scale."""
        found = list(self._pattern.finditer(reply))
        if not found:
            return None
        try:
            value = float(found[-1][1] if self._pattern.groups else found[-1][0])
        except ValueError:
            return None
        return value if self._settings.low <= value <= self._settings.high else None

    def _keep(self, key: str, value: float) -> None:
        known = self._known if self._known is not None else OrderedDict()
        known[key] = value
        while len(known) > MAX_CACHED:
            known.popitem(last=False)
        if self._settings.cache is not None:
            with self._settings.cache.open("a", encoding="ascii") as file:  # one short line: processes may share the file
                file.write(json.dumps({"key": key, "value": value}) + "\n")


def judge(
    prompt_template: str,
    *,
    model: str,
    base_url: str = "http://127.0.0.1:8000/v1",
    api_key_env: str = "OPENAI_API_KEY",
    pattern: str = r"-?\d+(?:\.\d+)?",
    scale: tuple[float, float] = (0.0, 10.0),
    request: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "max_tokens": 256}),
    timeout_s: float = 50.0,
    attempts: int = 3,
    cache: str | os.PathLike[str] | None = None,
    price: tuple[float, float] = (0.0, 0.0),
    max_cost: float = math.inf,
) -> JudgeReward:
    r"""Return a reward that a model gives which reads the answer, for use alone, or in `combine_rewards`.

    A judge that cannot be reached, is too late or gives no number makes a failed episode, never a reward of 0.

    Example:
        >>> reward = judge("Question: {prompt}\nAnswer: {completion}\nRate its clarity from 0 to 10.", model="judge")

    Args:
        prompt_template: What the judge reads, with ``{completion}`` and, where wanted, ``{prompt}``, ``{label}`` and columns of the task.
        model: Name of the model at the service.
        base_url: Address below which ``/chat/completions`` is.
        api_key_env: Environment variable with the key of the service; without a value none is sent.
        pattern: Regular expression whose last match in the reply, its first group if it has one, is the number.
        scale: Lowest and highest number; the reward is where the verdict lies between them, from 0 to 1. Others are asked for again.
        request: Further entries of the request.
        timeout_s: Deadline of a verdict with all attempts, seconds; keep it below ``--step-timeout-s``.
        attempts: Requests that may be sent for an answer, and replies that may be without a number.
        cache: File with verdicts (JSON lines), which is made, read and added to.
        price: Price of a million tokens read and of a million written; with them costs are counted.
        max_cost: Costs at which no further request is sent, in each process; episodes then fail.

    Raises:
        ConfigError: If an argument cannot be used.
    """
    _check_arguments(prompt_template, model, pattern, scale, timeout_s, attempts)
    path = None if cache is None else Path(cache).expanduser()
    url, body = check_url(base_url), {"model": model, **request}
    costs = price[0], price[1], max_cost
    return JudgeReward(
        JudgeSettings(prompt_template, model, url, api_key_env, pattern, scale[0], scale[1], body, timeout_s, attempts, path, *costs)
    )


def _check_arguments(template: str, model: str, pattern: str, scale: tuple[float, float], timeout_s: float, attempts: int) -> None:
    problems = (
        ("prompt_template", template, "completion" not in _FIELD.findall(template), "has no {completion}", "Say where the answer goes."),
        ("model", model, not model, "names no model", "Give the name under which the service knows it."),
        ("scale", scale, not scale[0] < scale[1], "must be a lower and a higher number", "Write scale=(0, 10)."),
        ("attempts", attempts, attempts < 1, "must be at least 1", "Write attempts=3."),
        ("timeout_s", timeout_s, not timeout_s > 0, "must be above 0", "Write timeout_s=50."),
    )
    for name, value, is_wrong, problem, remedy in problems:
        if is_wrong:
            raise ConfigError(f"judge({name}=...)", value, problem, remedy)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError("judge(pattern=...)", pattern, f"is no regular expression: {error}", "Leave it out for any number.") from None


def _plain(prompt: Prompt) -> str:
    """A prompt as text for the judge: messages with their roles, a single one without."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _read_cache(path: Path | None) -> OrderedDict[str, float]:
    """The verdicts in a file; lines that a crash cut short are passed over."""
    known: OrderedDict[str, float] = OrderedDict()
    if path is None or not path.exists():
        return known
    rows: list[Mapping[str, Any]] = []
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    for row in rows[-MAX_CACHED:]:
        known[str(row["key"])] = float(row["value"])
    return known
