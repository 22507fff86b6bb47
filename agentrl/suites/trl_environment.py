"""Environments of TRL's ``environment_factory`` (https://huggingface.co/docs/trl): ``--agent trl:file.py@CLASS``.

The public methods of an object are the model's tools; `reset` gets the columns of a row, and `get_reward` or reward functions judge.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.core.errors import EnvError, EnvLoadError, NotScoredError
from agentrl.core.types import Message, Prompt, Task, as_messages
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepReturn, StepState
from agentrl.env.images import lifted
from agentrl.env.results import bad_result, number
from agentrl.env.tools.environment import Tool, ToolEnv, invoke, with_tools
from agentrl.env.tools.mcp_servers import McpServer, current_servers
from agentrl.suites.scheme import FLAG, Scheme
from agentrl.suites.specs import check_options, class_name, is_count, named_object

FORM = "Write trl:file.py@CLASS, a class or function that makes an environment, or a dictionary of such."
RESET, GET_REWARD, KIND = "reset", "get_reward", "environment"


class TrlEnvironment(ToolEnv):
    """One rollout: the model calls the methods of an object until it answers without a call, or has no turn left.

    Attributes:
        factory: Makes the object, or a dictionary of such functions, of which the column ``environment`` names one.
        rewards: Reward functions by name, whose values are added to that of `get_reward`.
        num_tasks: Number of tasks without ``--prompts``; `None`: no end of them.
    """

    factory: ClassVar[Any]
    rewards: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    num_tasks: ClassVar[int | None] = None

    _object: Any = None
    _prompt: Sequence[Message] = ()

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Tasks without text, whose prompt is what `reset` returns."""
        numbers = itertools.count() if cls.num_tasks is None else range(cls.num_tasks)
        tasks = (Task([Message(role="user", content="")], id=str(number)) for number in numbers)
        return tasks if cls.num_tasks is None else list(tasks)

    @classmethod
    def preload(cls) -> None:
        """Make one object of each kind, as TRL does, so that a method without a schema fails before the first episode."""
        for make in _makers(cls.factory):
            for tool in map(Tool, _tools_of(make())):
                tool.schema()
                tool.check()

    def list_tools(self) -> Sequence[Callable[..., Any]]:
        """The public methods of the object, without its own `reset` and `get_reward`."""
        return _tools_of(self._object)

    def reset(self, state: ResetState) -> ResetResult | Awaitable[ResetResult]:
        """Make the object and reset it with the columns of the row; the text that it returns follows the last message."""
        self._object = self._made(state.task)
        self._columns = _columns(state.task)
        shown = self._object.reset(**self._columns)
        messages = as_messages(state.task.prompt)
        if shown is not None:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": _joined(last["content"], shown)}]
        prompt, images = lifted(messages, ())
        self._prompt, self._said = as_messages(prompt), list[Message]()
        if servers := current_servers():
            return self._with_servers(prompt, servers, images)
        schemas = self._box().schemas()
        return ResetResult(with_tools(prompt, schemas) if schemas else prompt, images=images)

    async def _with_servers(self, prompt: Prompt, servers: Sequence[McpServer], images: Sequence[Any]) -> ResetResult:
        return replace(await self._connected(prompt, servers), images=images)

    async def step(self, state: StepState) -> StepReturn:
        """Call the methods, or judge; TRL judges a rollout that has no turn left too."""
        self._said.append(Message(role="assistant", content=state.action_text))
        result = await super().step(state)
        assert isinstance(result, StepResult)
        if not result.terminated:
            self._said += as_messages(result.observation or ())
            if not state.turns_left:
                judged = await self.judge(state)
                return StepResult(judged.reward, truncated=True, info=result.info, reward_parts=judged.reward_parts)
        return result

    async def judge(self, state: StepState) -> StepResult:
        """Add up what `get_reward` and the reward functions give; `None` of one is left out.

        Raises:
            NotScoredError: If all are `None`.
        """
        values: dict[str, Any] = {}
        if hasattr(self._object, GET_REWARD):
            own = self._object.get_reward
            values[type(self._object).__name__] = await invoke(own, inspect.iscoroutinefunction(own))
        for name, function in self.rewards.items():
            values[name] = _only(await invoke(self._call(function), inspect.iscoroutinefunction(function)), name)
        parts = {name: number(value, name, "reward") for name, value in values.items() if value is not None}
        if not parts:
            raise NotScoredError(f"{', '.join(values)} returned None: no reward applies to this answer")
        return StepResult(sum(parts.values()), terminated=True, reward_parts=parts)

    def _made(self, task: Task) -> Any:
        if not isinstance(self.factory, Mapping):
            return type(self).factory()
        name = task.metadata.get(KIND)
        if name not in self.factory:
            raise EnvError(f"task {task.id!r}: column {KIND!r} is {name!r}, and the environments are {', '.join(map(str, self.factory))}")
        return self.factory[name]()

    def _call(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return the call of a reward function for this rollout, with lists of one entry."""
        given: dict[str, Any] = {name: [value] for name, value in self._columns.items()}
        given |= {"prompts": [self._prompt], "completions": [self._said], "environments": [self._object], "trainer_state": None}
        given |= {"log_extra": _ignored, "log_metric": _ignored}
        wanted = inspect.signature(function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in wanted.values())
        return functools.partial(function, **(given if takes_all else {name: given[name] for name in wanted if name in given}))


def _makers(factory: Any) -> list[Any]:
    return list(factory.values()) if isinstance(factory, Mapping) else [factory]


def _tools_of(environment: Any) -> list[Callable[..., Any]]:
    names = (name for name, _ in inspect.getmembers(type(environment), inspect.isfunction))
    return [getattr(environment, name) for name in names if name not in (RESET, GET_REWARD) and name[0] != "_"]


def _ignored(*args: Any, **kwargs: Any) -> None:
    """Stand in for functions of the trainer that log."""


def _only(value: Any, name: str) -> Any:
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if not isinstance(plain, list | tuple) or len(plain) != 1:
        raise bad_result(name, "rewards", value, "must be a list of one number or None, for one rollout")
    return plain[0]


def _columns(task: Task) -> dict[str, Any]:
    """Return the columns of a task's row as `reset` gets them; without a data set there are none."""
    messages = as_messages(task.prompt)
    own = {"prompt": messages} if messages[-1]["content"] else {}
    label = {} if task.label is None or task.label in task.metadata.values() else {"label": task.label}
    return {**own, **label, **{name: value for name, value in task.metadata.items() if name != KIND}}


def _joined(content: Any, shown: Any) -> Any:
    """Return the content of a message with what follows it, both text or both lists of parts."""
    if isinstance(content, str) and isinstance(shown, str):
        return content + shown
    return [*_parts(content), *_parts(shown)]


def _parts(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def load_trl(spec: str) -> type[TrlEnvironment]:
    """Return the class for ``trl:file.py@CLASS[?reward=NAME,NAME&num_tasks=N]``; rewards are functions of the same file."""
    factory, spec, options = named_object(spec, FORM)
    good: dict[str, Callable[[Any], Any]] = {"reward": lambda value: isinstance(value, str), "num_tasks": is_count}
    check_options(spec, options, good, "There is reward and num_tasks.", "Give names of functions, or a whole number.")
    module = inspect.getmodule(_makers(factory)[0])
    rewards = {name: getattr(module, name, None) for name in filter(None, str(options.get("reward", "")).split(","))}
    if missing := [name for name, value in rewards.items() if not callable(value)]:
        raise EnvLoadError(FLAG, spec, f"reward = {missing[0]!r} is no function of the same file", "Write trl:file.py@CLASS?reward=NAME.")
    for maker in _makers(factory):
        if not callable(maker) or (isinstance(maker, type) and not callable(getattr(maker, RESET, None))):
            raise EnvLoadError(FLAG, spec, f"{maker!r:.80} makes no environment with a method reset", FORM)
        if not rewards and isinstance(maker, type) and not hasattr(maker, GET_REWARD):
            raise EnvLoadError(
                FLAG, spec, f"{maker.__name__} has no method get_reward", "Name reward functions of its file with ?reward=NAME."
            )
    name = spec.partition("?")[0].rpartition("@")[2]
    body = {"factory": factory if isinstance(factory, Mapping) else staticmethod(factory), "rewards": rewards, "agent_spec": spec}
    return type(class_name(name, "Trl"), (TrlEnvironment,), {**body, "num_tasks": options.get("num_tasks"), "__module__": __name__})


TRL = Scheme(
    name="trl",
    load=load_trl,
    form="trl:file.py@CLASS",
    about="classes for [TRL](https://github.com/huggingface/trl)'s `environment_factory`, unchanged ([below](#trl))",
    needs="what the file imports",
)
