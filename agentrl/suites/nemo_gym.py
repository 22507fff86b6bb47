"""Resources servers of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym) as environments: ``--agent nemo-gym:http://HOST:PORT``.

One episode is ``/seed_session``, one POST per tool call of the model, ``/verify`` and ``/close_session``, all with the
session cookie that ``/seed_session`` set.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agentrl.core.errors import EnvLoadError, RemoteError, RewardError
from agentrl.core.types import Message, Prompt, Task, as_messages
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState
from agentrl.env.remote.wire import encode_json, excerpt
from agentrl.env.responses import PARAMS, Transcript, params_of, tools_of
from agentrl.env.results import number
from agentrl.env.timing import timed
from agentrl.env.tools.calls import BadCall, Parsed, ToolCall, parse_tool_calls
from agentrl.env.tools.environment import with_system, with_tools
from agentrl.suites.nemo_agent import NemoGymAgent, load_nemo_agent
from agentrl.suites.nemo_mcp import McpTools
from agentrl.suites.scheme import Scheme
from agentrl.suites.specs import check_options, figures, is_count, is_positive, server_url, split_spec

if TYPE_CHECKING:
    from agentrl.env.remote.http import HttpSession, JsonClient, Reply, SharedClient

_log = logging.getLogger(__name__)

TOLD = frozenset({400, 404, 405, 413, 422})
"""Statuses of a tool's route for a malformed call; the model reads the answer."""
RESERVED = frozenset({"seed_session", "verify", "close_session", "aggregate_metrics", "sandbox_access", "mcp"})
"""Routes of every resources server that are not tools: a model that could call them could set or read its own reward."""
MAX_BYTES, MAX_DEPTH, CONNECTIONS = 2**22, 64, 256
CLOSE_S = 5.0

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class NemoGymEnv(AgentInstance):
    """One episode on a resources server. Tasks are rows of NeMo Gym's JSONL, given with ``--prompts``.

    Attributes:
        url: Address of the server; several, separated by commas, are used in rotation, and an episode stays with one.
        timeout_s: Deadline of all calls in one `reset` or `step`; keep it below ``--reset-timeout-s`` and
            ``--step-timeout-s``, so that the error says which server was slow.
        max_steps: Maximum number of turns, after which the episode is verified; `None`: the limit is ``--max-turns``.
        max_calls: Maximum number of calls in one turn; further calls are refused.
        max_output_chars: Maximum length of a tool's answer that the model reads, characters.
        on_tool_failure: Treatment of a tool that breaks (5xx): ``raise`` makes the episode a failure of the environment,
            ``tell`` shows the error to the model, as NeMo Gym's own agents do.
        tool_prompt: System text that describes the tools. `None`: the model's chat template describes the row's tools, or,
            if it cannot, a text with their schemas. Empty: no description, for rows whose messages contain one.
    """

    url: ClassVar[str] = ""
    timeout_s: ClassVar[float] = 55.0
    max_steps: ClassVar[int | None] = None
    max_calls: ClassVar[int] = 8
    max_output_chars: ClassVar[int] = 10_000
    on_tool_failure: ClassVar[Literal["raise", "tell"]] = "raise"
    tool_prompt: ClassVar[str | None] = None

    _client: JsonClient | None = None
    _session: HttpSession
    _identity: Mapping[str, str] = {}
    _mcp: McpTools | None = None
    _tools: Mapping[str, Mapping[str, Any]] = {}

    @classmethod
    def left_unchecked(cls, tasks: Iterable[Task]) -> str:
        """Say for `agentrl check` that rows without usable tools leave the tools of the server unchecked; empty if some row has them."""
        if any(tools_of(task.metadata.get(PARAMS) or {}) for task in tasks):
            return ""
        names = "no row lists a function under responses_create_params.tools"
        return f"the server's tools: {names}, and those that a server lists over MCP are known only in an episode"

    def parse_calls(self, text: str) -> Sequence[Parsed]:
        """Return the calls in a turn, as `agentrl.env.tools.calls.parse_tool_calls` finds them."""
        return parse_tool_calls(text)

    async def reset(self, state: ResetState) -> ResetResult:
        """Begin a session; the model sees the row's input, its tools, and those that the server lists over MCP.

        Raises:
            ConfigError: If the task is not a row in NeMo Gym's form.
            RemoteError: If the server does not begin a session.
        """
        reply = await self._begin(state, "/seed_session")
        if b'"mcp"' in reply.body and isinstance(given := reply.json().get("mcp"), Mapping) and self._client is not None:
            self._mcp = McpTools(self._client, self._session, given, self.timeout_s)
            self._tools = {**await self._mcp.load(), **self._tools}
        return ResetResult(self._told(state.task.prompt))

    async def _begin(self, state: ResetState, path: str) -> Reply:
        """Begin a session by a route that sets its cookie; return the server's answer."""
        self._row = dict(state.task.metadata)
        self._params = params_of(state.task)
        self._tools, self._transcript = tools_of(self._params), Transcript()
        self._name = uuid.uuid4().hex
        self._client = client = self._shared().open()
        self._session = _new_session()
        reply = await client.call("POST", path, self._row, session=self._session, timeout_s=self.timeout_s)
        self._identity = _identity(self._session)
        if not self._identity:
            raise RemoteError(
                f"{self.url}{path}: set no session cookie, so episodes cannot be told apart; is it a resources server?",
                infrastructure=False,
            )
        return reply

    def _told(self, prompt: Prompt) -> Prompt | None:
        """The prompt with a description of the tools; `None` if it is told as it is."""
        if self.tool_prompt is None and self._tools:
            return with_tools(prompt, list(self._tools.values()))
        return with_system(prompt, self.tool_prompt) if self.tool_prompt else None

    async def step(self, state: StepState) -> StepResult:
        """Run the calls of this turn; a turn without calls is the answer and is verified.

        Raises:
            RemoteError: If the server fails, or loses the session.
            RewardError: If the server gives no usable reward.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._step(state)
        except TimeoutError:
            raise RemoteError(f"{self.url}: the turn was not done within {self.timeout_s:g} s") from None

    async def close(self) -> None:
        """End the session where the server offers /close_session."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._identity:
                session_id = next(filter(None, self._identity.values()), self._name)
                body = {"resources_session_id": session_id, "episode_id": {"rollout_id": self._name}}
                await client.call("POST", "/close_session", body, session=self._session, repeat=False, told=TOLD, timeout_s=CLOSE_S)
        except RemoteError as error:
            _log.debug("%s", error)
        finally:
            await self._shared().close()

    @classmethod
    @cache
    def _shared(cls) -> SharedClient:
        """The connections of all episodes of this class."""
        from agentrl.env.remote.http import HttpLimits, JsonClient, SharedClient

        seconds, urls = cls.timeout_s, cls.url.split(",")
        limits = HttpLimits(timeout_s=seconds, attempt_timeout_s=seconds, max_bytes=MAX_BYTES, max_depth=MAX_DEPTH, connections=CONNECTIONS)
        return SharedClient(lambda: JsonClient(urls, limits))

    async def _step(self, state: StepState) -> StepResult:
        cut = state.finish_reason == "length"
        calls = [] if cut else self.parse_calls(state.action_text)
        call_ids = iter(self._transcript.add_turn(state.action_text, calls, is_complete=not cut))
        if not calls:
            return await self._verify(truncated=cut)
        results, bad = [], 0
        for index, call in enumerate(calls):
            text, good = await self._run(call) if index < self.max_calls else _error(f"only {self.max_calls} calls are run in one turn")
            bad += not good
            name = call.name[:80] if isinstance(call, ToolCall) else ""
            if isinstance(call, ToolCall):
                self._transcript.add_output(next(call_ids), text)
            results.append(Message(role="tool", content=text, name=name))
        counts = {"tool_calls": float(len(calls)), "bad_calls": float(bad)}
        if state.turn + 1 == self.max_steps or state.get("turns_left") == 0:
            return await self._verify(truncated=True, info=counts)
        return StepResult(0.0, results, info=counts)

    async def _run(self, call: Parsed) -> tuple[str, bool]:
        """Run a tool call; return the text for the model, and False if the call could not be run."""
        if isinstance(call, BadCall):
            return _error(call.problem)
        if call.name not in self._tools or call.name in RESERVED or not _NAME.fullmatch(call.name):
            known = ", ".join(name for name in self._tools if name not in RESERVED)
            return _error(f"there is no tool {call.name[:80]!r}; there is {known or 'none'}")
        arguments = _by_name(call.arguments, self._tools[call.name])
        try:
            # Tried here, since arguments that cannot be sent are a mistake of the model and no failure of the server.
            encode_json(arguments)
        except RemoteError as error:
            return _error(f"the arguments of {call.name} cannot be sent: {error}")
        if arguments is None:
            return _error(f"{call.name} takes fewer arguments")
        if self._mcp is not None and call.name in self._mcp.names and call.name not in tools_of(self._params):
            with timed(call.name):
                text, good = await self._mcp.call(call.name, arguments)
            return (self._cut(text), True) if good else _error(self._cut(text))
        told = TOLD if self.on_tool_failure == "raise" else TOLD | {500}
        with timed(call.name):
            reply = await self._call(f"/{call.name}", arguments, told)
        text = self._cut(reply.text)
        return (text, True) if reply.status not in told else _error(f"{reply.status}: {text}")

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.max_output_chars else f"{text[: self.max_output_chars]}... (cut)"

    async def _verify(self, *, truncated: bool, info: Mapping[str, float] | None = None) -> StepResult:
        reply, answer = await self._judged("/verify", is_complete=not truncated)
        if answer.get("mask_sample") is True:
            reason = excerpt(f"{answer.get('failure_kind') or ''} {answer.get('failure_reason') or ''}")
            raise RewardError(f"{reply.url}: the server says that its reward measures nothing (mask_sample): {reason}")
        parts = answer.get("reward_components") or {}
        return StepResult(
            number(answer.get("reward"), reply.url, "reward"),
            terminated=not truncated,
            truncated=truncated,
            reward_parts=parts if isinstance(parts, Mapping) else {},
            info={**(info or {}), **figures(answer, (*self._row, "reward", "mask_sample"))},
        )

    async def _judged(self, path: str, *, is_complete: bool) -> tuple[Reply, Mapping[str, Any]]:
        """Send the row with the transcript as its response; return the answer, which is an object."""
        response = self._transcript.response(self._params, self._name, is_complete=is_complete)
        reply = await self._call(path, {**self._row, "response": response})
        answer = reply.json()
        if not isinstance(answer, Mapping):
            raise RewardError(f"{reply.url}: answered {excerpt(reply.text, 80)!r}, which is no object with a reward")
        return reply, answer

    async def _call(self, path: str, body: Any, told: frozenset[int] = frozenset()) -> Reply:
        """Call the server without repeating a request that may have taken effect; check that the answer is of this session."""
        if self._client is None:
            raise RuntimeError(f"{type(self).__name__} was used before reset; call super().reset(state) in your own reset")
        reply = await self._client.call("POST", path, body, session=self._session, repeat=False, told=told, timeout_s=self.timeout_s)
        now = _identity(self._session)
        if any(now.get(name) != session_id for name, session_id in self._identity.items()):
            raise RemoteError(f"{reply.url}: answered for another session than /seed_session began, so the episode's state is lost")
        return reply


class NemoGymnasiumEnv(NemoGymEnv):
    """One episode on a server with ``/reset`` and ``/step``, which judges each turn; options and limits are those of `NemoGymEnv`."""

    async def reset(self, state: ResetState) -> ResetResult:
        """Begin a session; the model sees the row's input, what the server says, and the tools."""
        answer = (await self._begin(state, "/reset")).json()
        said = answer.get("observation") if isinstance(answer, Mapping) else None
        prompt = [*as_messages(state.task.prompt), *([Message(role="user", content=str(said))] if said else [])]
        return ResetResult(self._told(prompt) or (prompt if said else None))

    async def _step(self, state: StepState) -> StepResult:
        cut = state.finish_reason == "length"
        calls = self.parse_calls(state.action_text) if self._tools and not cut else []
        self._transcript = Transcript()
        call_ids = self._transcript.add_turn(state.action_text, calls, is_complete=not cut)
        names = dict(zip(call_ids, [call.name for call in calls if isinstance(call, ToolCall)], strict=True))
        reply, answer = await self._judged("/step", is_complete=not cut)
        info = answer.get("info") if isinstance(answer.get("info"), Mapping) else {}
        outputs = [output for output in (info or {}).get("tool_outputs") or () if isinstance(output, Mapping)]
        said = [Message(role="tool", content=str(item.get("output")), name=names.get(str(item.get("call_id")), "")) for item in outputs]
        said += [Message(role="tool", content=_error(call.problem)[0], name="") for call in calls if isinstance(call, BadCall)]
        said += [Message(role="user", content=str(answer["observation"]))] if answer.get("observation") else []
        over = bool(answer.get("terminated")), bool(answer.get("truncated")) or state.turn + 1 == self.max_steps
        return StepResult(
            number(answer.get("reward"), reply.url, "reward"),
            None if any(over) else said or None,
            terminated=over[0],
            truncated=over[1] and not over[0],
            info=figures(info, (*self._row, "reward", "mask_sample")),
        )


OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "timeout_s": is_positive,
    **dict.fromkeys(("max_steps", "max_calls", "max_output_chars"), is_count),
    "on_tool_failure": lambda value: value in ("raise", "tell"),
}
"""Options of a specification, which are attributes of `NemoGymEnv` -> check of a value."""
FORMS = {"tools": NemoGymEnv, "gymnasium": NemoGymnasiumEnv}


def load_nemo_gym(spec: str) -> type[NemoGymEnv] | type[NemoGymAgent]:
    """Return the class for ``nemo-gym:http://HOST:PORT[,...][?option=value&...]``; options are attributes of `NemoGymEnv`."""
    urls, options = split_spec(spec)
    form = options.pop("form", "tools")
    if form == "agent":
        return load_nemo_agent(spec, urls, options)
    if form not in FORMS:
        raise EnvLoadError("--agent", spec, f"form = {form!r} is unknown", f"There is {', '.join(FORMS)} and agent.")
    check_options(spec, options, OPTIONS, f"There is {', '.join(OPTIONS)}.", "See docs/nemo_gym.md.")
    checked = ",".join(server_url(url, "nemo-gym:http://HOST:PORT") for url in urls.split(","))
    base = FORMS[form]
    return type("NemoGym", (base,), {"url": checked, "__module__": __name__, "__doc__": base.__doc__, **options})


def _new_session() -> HttpSession:
    from agentrl.env.remote.http import HttpSession

    return HttpSession()


def _identity(session: HttpSession) -> dict[str, str]:
    """Return the session id in each cookie by the cookie's name, "" where it cannot be read; signed cookies change with every answer."""
    found = {}
    for cookie in session.cookies.jar:
        try:
            payload = json.loads(base64.b64decode((cookie.value or "").partition(".")[0], validate=True))
            found[cookie.name] = str(payload["session_id"])
        except (ValueError, TypeError, KeyError):
            found[cookie.name] = ""
    return dict(sorted(found.items()))


def _by_name(arguments: Mapping[str, Any] | tuple[Any, ...], schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return arguments by name; positional ones follow the order of the tool's schema. `None` if there are too many."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    names = list(schema["function"].get("parameters", {}).get("properties", {}))
    return dict(zip(names, arguments, strict=False)) if len(arguments) <= len(names) else None


def _error(problem: str) -> tuple[str, bool]:
    return f"Error: {problem}", False


NEMO_GYM = Scheme(
    name="nemo-gym",
    load=load_nemo_gym,
    is_remote=True,
    form="nemo-gym:http://HOST:PORT",
    about="a server of [NeMo Gym](nemo_gym.md)",
    needs="the server",
)
