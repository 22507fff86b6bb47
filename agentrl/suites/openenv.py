"""Servers of OpenEnv (https://github.com/huggingface/OpenEnv) as environments: ``--agent openenv:ws://HOST:PORT``.

One episode is one WebSocket: ``reset`` with the seed, then a ``step`` per turn until the environment is done.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from agentrl.core.errors import ConfigError, EnvLoadError, RemoteError, RewardError
from agentrl.core.plugins import load_plugin
from agentrl.core.types import Prompt, Task, as_messages
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState
from agentrl.env.remote.wire import JsonSocket, excerpt
from agentrl.env.results import number
from agentrl.suites.gymnasium import last_word
from agentrl.suites.scheme import Scheme
from agentrl.suites.specs import check_options, figures, import_suite, is_positive, seeded_tasks, server_url, split_spec, take_count

if TYPE_CHECKING:
    from agentrl.env.remote.http import SharedClient

SEEDS = 2**31
ATTEMPTS = 5
BACKOFF_S, MAX_BACKOFF_S = 0.1, 4.0
FULL = "CAPACITY_REACHED"
OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "action_field": lambda value: isinstance(value, str) and value,
    "max_invalid": lambda value: type(value) is int and value >= 0,
    "invalid_reward": lambda value: type(value) in (int, float),
    "timeout_s": is_positive,
}
"""Options of a specification that are attributes of `OpenEnvEnv` -> check of a value."""

Formatter: TypeAlias = Callable[[Mapping[str, Any]], Prompt]


class OpenEnvEnv(AgentInstance):
    """One episode on an OpenEnv server.

    An answer that `parse_action` or the server's schema refuses is not acted on. The model reads what was wrong and may
    try again, up to `max_invalid` times in a row, each time for a reward of `invalid_reward`.

    Attributes:
        url: Address of the server, ``ws`` or ``wss``, without ``/ws``.
        timeout_s: Deadline of one `reset` or `step`, waiting for a free session included; keep it below
            ``--reset-timeout-s`` and ``--step-timeout-s``, so that the error names the server and not only the deadline.
        action_field: Field that the model's text goes into; empty: the only field of the server's action schema.
        num_tasks: Number of tasks, with the seeds 0, 1, ...; `None`: endless tasks, with seeds derived from the run's.
        max_invalid: Maximum number of consecutive answers that are no action.
        invalid_reward: Reward of each such answer.
        schema: JSON schema of the server's actions, from `reset` on; empty if the server offers none.
    """

    url: ClassVar[str] = ""
    timeout_s: ClassVar[float] = 55.0
    action_field: ClassVar[str] = ""
    num_tasks: ClassVar[int | None] = None
    max_invalid: ClassVar[int] = 2
    invalid_reward: ClassVar[float] = 0.0

    schema: Mapping[str, Any] = {}

    _action: ClassVar[Mapping[str, Any] | None] = None
    _socket: JsonSocket | None = None
    _is_open = False
    _invalid = 0
    _rewarded = False

    def format_observation(self, observation: Mapping[str, Any]) -> Prompt:
        """Return an observation for the model: the text of its only field, or one line per non-empty field."""
        shown = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "", [], {})}
        if len(shown) == 1:
            return _plain(next(iter(shown.values())))
        return "\n".join(f"{key}: {_plain(value)}" for key, value in shown.items())

    def parse_action(self, text: str) -> Mapping[str, Any]:
        """Return the fields of the action that an answer names: a JSON object, or the value of the only field.

        Raises:
            ValueError: If the answer names no action; the model reads the message.
        """
        if (value := _json_object(text)) is not None:
            return value
        fields = self._fields()
        required = [name for name in self.schema.get("required", ()) if name in fields]
        if named := _named_fields(text, fields):
            return named
        only = self.action_field or (next(iter(fields)) if len(fields) == 1 else "")
        if not only:
            optional = [name for name in fields if name not in required]
            needs = f" with {', '.join(required or fields)}{' and perhaps ' + ', '.join(optional) if required and optional else ''}"
            raise ValueError(f"Write the action as a JSON object{needs if fields else ''}.")
        return {only: _value(text, only, fields.get(only, {}))}

    def describe_action(self) -> str:
        """Return what the model reads of the action's form before its first turn; empty if an action is a single field."""
        fields = self._fields()
        if len(fields) < 2 or self.action_field:
            return ""
        required = self.schema.get("required", ())
        lines = [f"  {_field_line(name, field, name in required)}" for name, field in fields.items()]
        return "Write each action as a JSON object with these fields:\n" + "\n".join(lines)

    def _fields(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: field for name, field in self.schema.get("properties", {}).items() if name != "metadata"}

    def is_truncated(self, answer: Mapping[str, Any]) -> bool:
        """Return True if the episode was cut short; OpenEnv has no field for truncation, so environments put it in metadata."""
        places = (answer, answer.get("observation"), answer.get("metadata"), (answer.get("observation") or {}).get("metadata"))
        return any(isinstance(place, Mapping) and place.get("truncated") is True for place in places)

    def reset_data(self, state: ResetState) -> dict[str, Any]:
        """Return the server's `reset` arguments: the seed, and the entries under ``reset`` in the task's metadata."""
        arguments = state.task.metadata.get("reset")
        return {"seed": state.seed % SEEDS, **(arguments if isinstance(arguments, Mapping) else {})}

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per seed; all episodes of a group use the same seed."""
        return seeded_tasks(cls.url, cls.num_tasks, numbered=True)

    async def reset(self, state: ResetState) -> ResetResult:
        """Connect, wait for a free session, and begin the episode.

        Raises:
            RemoteError: If no session is free in time, or the environment cannot begin.
        """
        data, last = self.reset_data(state), ""
        try:
            async with asyncio.timeout(self.timeout_s):
                self.schema = await self._schema()
                for attempt in itertools.count():
                    answer, last = await self._begin(data, attempt)
                    if answer is not None:
                        break
                    # A random time, so that episodes which were refused together do not come back together.
                    await asyncio.sleep(random.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(attempt, 10))))
        except TimeoutError:
            raise RemoteError(f"{self.url}: no session within {self.timeout_s:g} s{'; last: ' + last if last else ''}") from None
        assert answer is not None
        if answer["done"]:
            raise RemoteError(f"{self.url}: the episode was over when it began", infrastructure=False)
        observation, form = self.format_observation(answer["observation"]), self.describe_action()
        return ResetResult(_after(state.task, _with_form(observation, form) if form else observation))

    async def step(self, state: StepState) -> StepResult:
        """Take the action that the model named, or tell the model why its answer names none.

        Raises:
            RemoteError: If the server fails, or its environment raises.
            RewardError: If the episode ends and no reward was ever given.
        """
        if self._socket is None:
            raise RuntimeError(f"{type(self).__name__} was used before reset; call super().reset(state) in your own reset")
        try:
            action = dict(self.parse_action(state.action_text))
        except ValueError as error:
            return self._refuse(str(error))
        frame = await self._socket.ask({"type": "step", "data": action}, self.timeout_s)
        code, problem = _error(frame)
        if code == "VALIDATION_ERROR":
            return self._refuse(problem)
        if code:
            raise RemoteError(f"{self.url}: {code}: {problem}", infrastructure=False)
        self._invalid = 0
        return self._result(self._observed(frame))

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        try:
            if socket is not None:
                await socket.close({"type": "close"})
        finally:
            if self._is_open:
                self._is_open = False
                await self._shared().close()

    @classmethod
    @cache
    def _shared(cls) -> SharedClient:
        """The connections over which episodes of this class ask for the schema."""
        from agentrl.env.remote.http import HttpLimits, JsonClient, SharedClient

        address, limits = re.sub(r"^ws", "http", cls.url), HttpLimits(timeout_s=cls.timeout_s, attempt_timeout_s=cls.timeout_s)
        return SharedClient(lambda: JsonClient([address], limits))

    async def _schema(self) -> Mapping[str, Any]:
        """Return the schema of the actions; the server is asked once per class."""
        cls = type(self)
        # Of this class alone, as one that inherits may have another server.
        if "_action" not in vars(cls) or cls._action is None:
            client = self._shared().open()
            self._is_open = True
            reply = await client.call("GET", "/schema", told=(404, 405))
            answer = reply.json() if reply.status == 200 else {}
            action = answer.get("action") if isinstance(answer, Mapping) else None
            cls._action = action if isinstance(action, Mapping) else {}
        return cls._action

    async def _begin(self, data: Mapping[str, Any], attempt: int) -> tuple[Mapping[str, Any] | None, str]:
        """Try once to get a session; return the first observation, or `None` and the reason for another attempt."""
        try:
            self._socket = await JsonSocket.open(f"{self.url}/ws")
            frame = await self._socket.ask({"type": "reset", "data": data}, self.timeout_s)
            code, problem = _error(frame)
            if code == FULL:
                raise RemoteError(f"{FULL}: {problem}")
            if code:
                raise RemoteError(f"{self.url}: {code}: {problem}", infrastructure=False)
            return self._observed(frame), ""
        except RemoteError as error:
            if self._socket is not None:
                await self._socket.close()
                self._socket = None
            if not error.infrastructure or (attempt + 1 >= ATTEMPTS and FULL not in str(error)):
                raise
            return None, str(error)

    def _observed(self, frame: Any) -> Mapping[str, Any]:
        """Return the data of an observation frame; `RemoteError` for any other frame."""
        data = frame.get("data") if isinstance(frame, Mapping) and frame.get("type") == "observation" else None
        if not isinstance(data, Mapping) or not isinstance(data.get("observation"), Mapping) or not isinstance(data.get("done"), bool):
            raise RemoteError(f"{self.url}: answered {excerpt(str(frame), 120)}, which is no observation", infrastructure=False)
        return data

    def _result(self, answer: Mapping[str, Any]) -> StepResult:
        done = answer["done"]
        reward = answer.get("reward")
        self._rewarded = self._rewarded or reward is not None
        if done and not self._rewarded:
            raise RewardError(f"{self.url}: the episode is done, and no step of it had a reward")
        truncated = done and self.is_truncated(answer)
        return StepResult(
            0.0 if reward is None else number(reward, self.url, "reward"),  # many environments have a reward at the end only
            None if done else self.format_observation(answer["observation"]),
            terminated=done and not truncated,
            truncated=truncated,
            info={"invalid_action": 0.0, **figures(answer.get("metadata"))},
        )

    def _refuse(self, problem: str) -> StepResult:
        self._invalid += 1
        over = self._invalid > self.max_invalid
        return StepResult(self.invalid_reward, problem, terminated=over, score=0.0 if over else None, info={"invalid_action": 1.0})


def load_openenv(spec: str) -> type[OpenEnvEnv]:
    """Return the class for ``openenv:ws://HOST:PORT[?option=value&...]``; options are attributes of `OpenEnvEnv`, and ``formatter``."""
    import_suite(spec, "websockets", "openenv")
    url, options = split_spec(spec)
    body: dict[str, Any] = {"num_tasks": take_count(spec, options, "num_tasks"), "__module__": __name__, "__doc__": OpenEnvEnv.__doc__}
    body["url"] = server_url(url, "openenv:ws://HOST:PORT", ("ws", "wss"))
    if "formatter" in options:
        name = str(options.pop("formatter"))
        function = _formatter(spec, name)
        body["format_observation"] = lambda self, observation: function(observation)
        # Other processes of the run may have another current directory.
        body["agent_spec"] = spec.replace(name, f"{Path(name.rpartition(':')[0]).absolute()}:{name.rpartition(':')[2]}")
    known = f"There is formatter, num_tasks, {', '.join(OPTIONS)}."
    check_options(spec, options, OPTIONS, known, known)
    return type("OpenEnv", (OpenEnvEnv,), {**body, **options})


def _formatter(spec: str, name: str) -> Formatter:
    """Return the function that ``file.py:function`` names."""
    try:
        function = load_plugin("--agent", name)
    except ConfigError as error:
        raise EnvLoadError("--agent", spec, error.problem, error.remedy) from error
    if not callable(function):
        raise EnvLoadError("--agent", spec, f"{name} is a {type(function).__name__}, not a function", "Name a function of the observation.")
    return function  # type: ignore[no-any-return]


def _error(frame: Any) -> tuple[str, str]:
    """Return code and message of an error frame; two empty strings for any other frame."""
    if not isinstance(frame, Mapping) or frame.get("type") != "error":
        return "", ""
    data = frame.get("data") if isinstance(frame.get("data"), Mapping) else {}
    assert isinstance(data, Mapping)
    errors = data.get("errors")
    errors = [error for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    problems = [f"{'.'.join(map(str, error.get('loc') or ()))}: {error.get('msg')}" for error in errors[:8]]
    return str(data.get("code") or "ERROR")[:40], "; ".join(problems) or excerpt(str(data.get("message")))


def _value(text: str, name: str, field: Mapping[str, Any]) -> Any:
    """Read the value of one action field from the model's text."""
    kind, words = field.get("type"), field.get("enum")
    if words and all(isinstance(word, str) for word in words):
        return _last(text, {word: word for word in words}, f"Choose one of {', '.join(words)}.")
    if kind == "boolean":
        return _last(text, {"true": True, "yes": True, "false": False, "no": False}, f"Say true or false ({name}).")
    if kind in ("integer", "number"):
        numbers = re.findall(r"-?\d+(?:\.\d+)?" if kind == "number" else r"-?\d+", text)
        if not numbers:
            raise ValueError(f"Write a number ({name}).")
        return float(numbers[-1]) if kind == "number" else int(numbers[-1])
    if kind in ("array", "object"):
        raise ValueError(f"Write the action as a JSON object with {name}.")
    return text.strip()


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that an answer is, or the last one in it, in a code block for example."""
    decoder, found, start = json.JSONDecoder(), None, text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found = value if isinstance(value, dict) else found
        start = text.find("{", end)
    return found


def _named_fields(text: str, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of lines such as ``number: 5``, one per field, if there are several fields."""
    if len(fields) < 2:
        return {}
    lines = re.findall(r"^\s*[\"']?(\w+)[\"']?\s*[:=]\s*(.+?)\s*$", text, re.MULTILINE)
    return {name: _value(value, name, fields[name]) for name, value in lines if name in fields}


def _field_line(name: str, field: Mapping[str, Any], required: bool) -> str:
    words = field.get("enum")
    kind = f"one of {', '.join(map(str, words))}" if words else str(field.get("type", "any value"))
    text = excerpt(str(field.get("description") or ""), 200)
    return f"{name}: {kind}{'' if required else ', optional'}{' (' + text + ')' if text else ''}"


def _with_form(observation: Prompt, form: str) -> Prompt:
    if isinstance(observation, str):
        return f"{observation}\n{form}"
    return [*observation, *as_messages(form)]


def _last(text: str, words: Mapping[str, Any], problem: str) -> Any:
    try:
        return last_word(text, words)
    except ValueError:
        raise ValueError(problem) from None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _after(task: Task, observation: Prompt) -> Prompt:
    """Return the observation, after the task's prompt if the user gave one."""
    if task.metadata.get("numbered"):
        return observation
    if isinstance(task.prompt, str) and isinstance(observation, str):
        return f"{task.prompt}\n{observation}"
    return [*as_messages(task.prompt), *as_messages(observation)]


OPENENV = Scheme(
    name="openenv",
    load=load_openenv,
    is_remote=True,
    form="openenv:ws://HOST:PORT",
    about="a server of [OpenEnv](openenv.md)",
    needs="the server, and `pip install 'agentrl[openenv]'`",
)
