"""Python functions as tools, with schemas, calls checked against type hints, and limits; and `ToolEnv`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import typing
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from agentrl.core.errors import RemoteError, SandboxError
from agentrl.core.types import Message, Prompt, as_messages
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepReturn, StepState
from agentrl.env.results import said
from agentrl.env.threads import Threads
from agentrl.env.timing import timed
from agentrl.env.tools.calls import BadCall, Parsed, ToolCall, ToolCallError, ToolFailedError, parse_tool_calls
from agentrl.env.tools.mcp import McpSessions, McpTool
from agentrl.env.tools.mcp_servers import McpServer, ServerLike, current_servers, servers_of
from agentrl.env.whole_text import whole_text

Verdict: TypeAlias = StepReturn | float

TOOL_THREADS = 32
MAX_PROBLEM = 500

_THREADS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Threads] = weakref.WeakKeyDictionary()

TOOL_PROMPT = """You may call tools. To call one, write nothing but a JSON object in tags:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>
These are the tools:
"""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Text for the model, and kind of a call's outcome: ``bad_call`` could not be run, ``failed`` raised or took too long."""

    text: str
    kind: Literal["ok", "bad_call", "failed"] = "ok"


def _line(function: Callable[..., Any]) -> str:
    """Return the file and the line of a function, for messages; "" if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""


class Tool:
    """One function as a tool, with a type hint for every parameter; a ``def`` runs on a thread, an ``async def`` on the loop."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function) or not hasattr(function, "__name__"):
            raise TypeError(f"tool {function!r:.80}: must be a function; write a def around it")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"tool {function.__name__}: is a generator; return the result as a whole")
        self.function, self.name = function, function.__name__
        self._parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in self._parameters.items():
            if name not in hints:
                raise TypeError(f"tool {self.name}: parameter {name} needs a type hint, such as {name}: str{_line(function)}")
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool {self.name}: parameter {name} cannot be given by name")
        self._hints = {name: hints[name] for name in self._parameters}

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema in the form that chat templates take, from type hints and the Google-style docstring.

        Raises:
            TypeError: If the docstring or the description of a parameter is missing, or a type has no schema.
        """
        from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

        try:
            return dict(get_json_schema(self.function))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise TypeError(f"tool {self.name}: {error}") from error

    def check(self) -> None:
        """Make sure that arguments can be checked against the type hints, else raise `TypeError`."""
        from pydantic import PydanticUserError

        try:
            self._adapter  # noqa: B018
        except PydanticUserError as error:
            raise TypeError(f"tool {self.name}: its arguments cannot be checked: {str(error).splitlines()[0]}") from error

    def bind(self, arguments: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """Return arguments by name, checked against the type hints and converted where nothing is lost ("7" to 7); or `ToolCallError`."""
        from pydantic import ValidationError

        if not isinstance(arguments, Mapping):
            if len(arguments) > len(self._parameters):
                raise ToolCallError(f"{self.name} takes {len(self._parameters)} arguments, not {len(arguments)}")
            arguments = dict(zip(self._parameters, arguments, strict=False))
        try:
            return dict(self._adapter.validate_python(arguments))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
            raise ToolCallError(f"{self.name}: {'; '.join(problems)}") from None

    @functools.cached_property
    def _adapter(self) -> Any:
        from pydantic import ConfigDict, TypeAdapter, with_config
        from typing_extensions import TypedDict

        optional = {name for name, parameter in self._parameters.items() if parameter.default is not parameter.empty}
        fields = {name: typing.NotRequired[hint] if name in optional else hint for name, hint in self._hints.items()}
        # Not the TypedDict of typing, which pydantic refuses before Python 3.12.
        arguments = TypedDict("Arguments", fields)  # type: ignore[misc]  # its fields are known only here
        return TypeAdapter(with_config(ConfigDict(extra="forbid", arbitrary_types_allowed=True))(arguments))


class Toolbox:
    """A set of tools whose calls run under limits of time and output length; the attributes of `ToolEnv` document them."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        others: Sequence[McpTool] = (),
        timeout_s: float = 10.0,
        max_output_chars: int = 4000,
        on_failure: Literal["tell", "raise"] = "tell",
    ) -> None:
        tools: list[Tool | McpTool] = [*map(Tool, functions), *others]
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            raise TypeError(f"several tools are called {max(names, key=names.count)}; a model cannot tell them apart")
        self._timeout_s, self._max_output_chars, self._on_failure = timeout_s, max_output_chars, on_failure

    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of all tools."""
        return [tool.schema() for tool in self.tools.values()]

    async def run(self, call: Parsed) -> ToolOutcome:
        """Run one call; an error in the call becomes text for the model, and with `on_failure` ``tell`` an exception of the tool, too.

        Raises:
            RemoteError: If the tool's server is gone.
            SandboxError: If its sandbox failed.
        """
        if isinstance(call, BadCall):
            return _bad(call.problem)
        tool = self.tools.get(call.name)
        if tool is None:
            return _bad(f"there is no tool {call.name[:80]!r}; there is {', '.join(self.tools)}")
        try:
            arguments = tool.bind(call.arguments)
        except ToolCallError as error:
            return _bad(str(error))
        try:
            with timed(tool.name):
                value = await self._limited(tool, arguments)
        except (RemoteError, SandboxError):  # of a server that is gone, say, for which the model cannot answer
            raise
        except Exception as error:
            if self._on_failure == "raise":
                raise
            text = str(error) if isinstance(error, ToolFailedError) else said(error)
            return ToolOutcome(_cut(f"Error: {text}", self._max_output_chars), "failed")
        return ToolOutcome(_cut(_as_text(value), self._max_output_chars))

    async def _limited(self, tool: Tool | McpTool, arguments: dict[str, Any]) -> Any:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await invoke(functools.partial(tool.function, **arguments), inspect.iscoroutinefunction(tool.function))
                return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            # A TimeoutError of the tool's own, which is no late call.
            if not limit.expired():
                raise
            raise TimeoutError(f"{tool.name} gave no result within {self._timeout_s:g} s") from None


class ToolEnv(AgentInstance):
    """An environment in which the model may call tools before it answers.

    A turn with calls is answered with one message of the role ``tool`` per call; a turn without calls is the answer and
    goes to `judge`. For a call that cannot be run the model reads a text that begins with "Error:"; `on_tool_failure`
    decides about exceptions inside a tool.

    Attributes:
        tools: Functions with type hints and Google-style docstrings.
        mcp: Servers of the Model Context Protocol whose tools are offered too: `McpServer`, or a text as ``--mcp`` takes it. Sessions with
            them begin in `reset` and end in `close`; what overrides these calls them.
        tool_prompt: System text that describes the tools. `None`: the model's chat template describes them, or, if it
            cannot, a system text with their schemas. Empty: no description, for tasks whose prompts contain one.
        tool_timeout_s: Time limit of one call.
        max_output_chars: Maximum length of a result that the model reads, characters.
        max_calls: Maximum number of calls in one turn; further calls are refused.
        on_tool_failure: ``tell`` the model of exceptions in a tool, or ``raise`` them, so that the episode fails.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    mcp: ClassVar[Sequence[ServerLike]] = ()
    tool_prompt: ClassVar[str | None] = None
    tool_timeout_s: ClassVar[float] = 10.0
    max_output_chars: ClassVar[int] = 4000
    max_calls: ClassVar[int] = 8
    on_tool_failure: ClassVar[Literal["tell", "raise"]] = "tell"

    _sessions: McpSessions | None = None

    def __init_subclass__(cls) -> None:
        if not isinstance(cls.tools, Sequence):
            raise TypeError(f"{cls.__name__}.tools = {cls.tools!r:.80}: must be a tuple of functions")
        # Made only to find two tools of the same name while the file is loaded.
        Toolbox(cls.tools)
        for function in cls.tools:
            Tool(function).check()
        servers_of(cls.mcp, f"{cls.__name__}.mcp")

    @classmethod
    def preload(cls) -> None:
        """Make the schemas of all tools once, so that a tool without one fails before the first episode."""
        if cls.tool_prompt is None:
            Toolbox(cls.tools).schemas()

    def list_tools(self) -> Sequence[Callable[..., Any]]:
        """Return the tools of this episode; bound methods share the episode's state."""
        return self.tools

    def parse_calls(self, text: str) -> Sequence[Parsed]:
        """Return the calls in a turn, as `agentrl.env.tools.calls.parse_tool_calls` finds them."""
        return parse_tool_calls(text)

    def judge(self, state: StepState) -> Verdict | Awaitable[Verdict]:
        """Judge the answer: a turn without a call.

        Returns:
            The reward, which ends the episode, or any result of a `step`, which may continue it.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method judge(self, state)")

    def reset(self, state: ResetState) -> ResetResult | Awaitable[ResetResult]:
        """Offer the tools to the model; with servers of tools the result has to be awaited."""
        servers = (*servers_of(self.mcp, f"{type(self).__name__}.mcp"), *current_servers())
        return self._connected(state.task.prompt, servers) if servers else self._offered(state.task.prompt)

    async def close(self) -> None:
        """End the sessions with servers of tools."""
        if self._sessions is not None:
            await self._sessions.close()

    async def _connected(self, prompt: Prompt, servers: Sequence[McpServer]) -> ResetResult:
        self._sessions = McpSessions()
        await self._sessions.open(servers)
        return self._offered(prompt)

    def _offered(self, prompt: Prompt) -> ResetResult:
        if self.tool_prompt is None:
            return ResetResult(with_tools(prompt, self._box().schemas()))
        return ResetResult(with_system(prompt, self.tool_prompt) if self.tool_prompt else None)

    async def step(self, state: StepState) -> StepReturn:
        """Run the calls of this turn, or judge the answer."""
        calls = self.parse_calls(state.action_text)
        if not calls:
            return await self._judged(state)
        box = self._box()
        # One after another, as the model wrote them: tools may share the state of the episode.
        outcomes = [await box.run(call) for call in calls[: self.max_calls]]
        outcomes += [_bad(f"only {self.max_calls} calls are run in one turn")] * (len(calls) - len(outcomes))
        results = [Message(role="tool", content=outcome.text, name=_name(call)) for call, outcome in zip(calls, outcomes, strict=True)]
        kinds = [outcome.kind for outcome in outcomes]
        counts = {"tool_calls": len(calls), "bad_calls": kinds.count("bad_call"), "failed_calls": kinds.count("failed")}
        return StepResult(0.0, results, info={key: float(value) for key, value in counts.items()})

    async def _judged(self, state: StepState) -> StepReturn:
        if inspect.iscoroutinefunction(self.judge):
            judged = await self.judge(state)
        else:
            async with _threads() as threads:
                judged = await threads.run(functools.partial(self.judge, state))
        return judged if isinstance(judged, StepResult | Mapping) else StepResult(judged, terminated=True)

    def _box(self) -> Toolbox:
        return Toolbox(
            self.list_tools(),
            others=self._sessions.tools if self._sessions is not None else (),
            timeout_s=self.tool_timeout_s,
            max_output_chars=self.max_output_chars,
            on_failure=self.on_tool_failure,
        )


async def invoke(call: Callable[[], Any], is_async: bool) -> Any:
    """Return what user code gives: a coroutine function's on the loop, another one's on a thread for tools."""
    if is_async:
        return await call()
    async with _threads() as threads:
        return await threads.call(call)


def _threads() -> Threads:
    """Return the tool threads of the running loop."""
    return _THREADS.setdefault(asyncio.get_running_loop(), Threads(TOOL_THREADS))


def _bad(problem: str) -> ToolOutcome:
    return ToolOutcome(f"Error: {_cut(problem, MAX_PROBLEM)}", "bad_call")


def _name(call: Parsed) -> str:
    return call.name[:80] if isinstance(call, ToolCall) else ""


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False, default=whole_text)
    except (ValueError, TypeError, RecursionError):
        return whole_text(value)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


def with_tools(prompt: Any, schemas: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the chat messages of a prompt with the JSON schemas of its tools, which the chat template describes."""
    first, *rest = as_messages(prompt)
    return [{**first, "tools": [*first.get("tools", ()), *schemas]}, *rest]


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return text that tells a model its tools and the form of a call."""
    return TOOL_PROMPT + "\n".join(map(json.dumps, schemas))


def with_system(prompt: Any, text: str) -> list[Message]:
    """Return the chat messages of a prompt, with `text` at the end of the system message."""
    messages = as_messages(prompt)
    if messages[0]["role"] != "system" or not isinstance(messages[0]["content"], str):
        return [Message(role="system", content=text), *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
