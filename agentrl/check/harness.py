"""Sessions of an agent program with a scripted model: what it asks, what it rewrites, and which tokens a learner would read in vain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from agentrl.check.black_box import PlayedAgent, ScriptedModel, find_problems, play_model
from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.learning import policy_row
from agentrl.check.play import TextPolicy
from agentrl.core.errors import EngineError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Generation, Task, Turn
from agentrl.env.agent import StepResult
from agentrl.harness import Calls, Script
from agentrl.rollout.endpoint.answers import JsonAnswerParser
from agentrl.rollout.endpoint.neutral import ChatRequest, Json, parsed_arguments, texts_of
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.recorder import Context as Branch
from agentrl.suites.command import filled
from agentrl.suites.harness import HarnessAgent, version_of

NUM_EDITS = 10
FILE, OTHER, LONG = "a.txt", "b.txt", "long-{}.txt"
PROMPT = f"Change each line of {FILE} to upper case, one line at a time."
NOTHING = "Nothing has to be done in this file."
LINES, NUM_LONG = 60, 36
"""Lines of a long file, and long files, which are read one after the other to fill a small context."""
ROOM = 65_000
"""Tokens that a small context has behind the first prompt; fewer than the long files, and enough for a program to compact in time."""
CONTEXT, MAX_NEW_TOKENS = 1_000_000, 8192
OWN_CONVERSATION = ("", "sub-agent")
"""Reasons of branches that repeat nothing of another."""
MAX_REWRITES, MAX_ERROR = 12, 300
SUMMARY = "So far the files were read."
_SUMMARY = re.compile(r"\b(summar|compact)", re.IGNORECASE)

Said = Calls | str


class SessionModel(ScriptedModel):
    """Plays the script of a program; titles, summaries and forced forms are answered as they are asked for.

    The first request numbered `fails_at` ends with an error of the engine.
    """

    def __init__(self, context: Context, task: Task, said: Sequence[Said], place: Stage, *, fails_at: int = -1) -> None:
        codec = context.player.codec
        policy = TextPolicy("session", lambda given: SUMMARY)
        super().__init__(codec, codec.parser, task, policy, seed=0, index=0)
        self._codec_of_session, self._said, self._place, self._fails_at = codec, said, place, fails_at
        self._names = {name for one in said if not isinstance(one, str) for name, _ in one}
        self.turn = 0

    async def sample(self, request: GenerationRequest) -> Generation:
        """As `ScriptedModel.sample`."""
        if self.turn == self._fails_at:
            self._fails_at = -1
            raise EngineError("the scripted engine fails once")
        return await super().sample(request)

    async def answer(self, asked: ChatRequest, number: int) -> list[int]:
        """The next of what is said, or the answer to a request that does not belong to the session."""
        if asked.constraint is not None or self._is_aside(asked):
            return await super().answer(asked, number)
        said = self._said[min(self.turn, len(self._said) - 1)]
        self.turn += 1
        self._place.is_complete = self.turn >= len(self._said)
        values = self._place.values
        if isinstance(said, str):
            return self._codec_of_session.encode_text(filled(said, values))
        calls = [{"name": name, "arguments": _filled_values(arguments, values)} for name, arguments in said]
        return self._codec_of_session.encode_text(self.written(calls, asked.tools))

    def _is_aside(self, asked: ChatRequest) -> bool:
        """Return True for a request of a helper, or for a summary of the conversation."""
        has_tools = bool(self._names & {tool["function"]["name"] for tool in asked.tools})
        last = next((message["content"] for message in reversed(asked.messages) if message["role"] == "user"), "")
        # A conversation that goes on after a compaction quotes the summary, and asks for none.
        wants_summary = self.turn > 0 and SUMMARY not in last and _SUMMARY.search(last) is not None
        return wants_summary or (bool(self._names) and not has_tools)


class Stage:
    """The working folder of a session, and what became of it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_edits = 0
        self.is_complete = False  # the model has said all that it has to say
        self.has_ended = False

    def prepare(self, work: Path) -> None:
        """Write the files of the session."""
        (work / FILE).write_text("".join(f"{old_line(number)}\n" for number in range(NUM_EDITS)))
        (work / OTHER).write_text(f"{NOTHING}\n")
        for number in range(NUM_LONG):
            (work / LONG.format(number)).write_text(
                "".join(f"{line}: the quick brown fox jumps over the lazy dog\n" for line in range(LINES))
            )
        self.values = {"folder": str(work), "file": str(work / FILE), "other": str(work / OTHER)}

    def judge(self, work: Path) -> float:
        """Return the share of the edits that were made."""
        lines = {line.strip() for line in (work / FILE).read_text().splitlines()}
        self.num_edits, self.has_ended = sum(new_line(number) in lines for number in range(NUM_EDITS)), True
        return self.num_edits / NUM_EDITS

    def agent(self, cls: type[HarnessAgent]) -> type[HarnessAgent]:
        """Return the class of a program whose sessions take place here."""
        stage = self

        async def _prepare(self: Any, task: Task, folder: Path) -> Path:
            work = await cls._prepare(self, task, folder)
            stage.prepare(work)
            return work

        async def _judge(self: Any, task: Task, work: Path, output: str) -> StepResult:
            return StepResult(stage.judge(work))

        return type(cls.__name__, (cls,), {"_prepare": _prepare, "_judge": _judge, "files": ""})


def old_line(number: int) -> str:
    """A line before its edit."""
    return f"line {number}"


def new_line(number: int) -> str:
    """A line after its edit."""
    return old_line(number).upper()


def edits_of(script: Script) -> list[Said]:
    """The answers of a session that reads two files side by side and then edits a file ten times."""
    edits = [_with_lines(script.edit, number) for number in range(NUM_EDITS)]
    if script.together:
        return ["\n\n".join(map(str, edits))]
    return [*([script.read] if script.read else []), *edits, script.end]


def readings_of(script: Script) -> list[Said]:
    """The answers of a session that fills a small context with long files."""
    name, arguments = script.read[1]
    longs = [f"{{folder}}/{LONG.format(number)}" for number in range(NUM_LONG)]
    return [*(((name, _filled_values(arguments, {"other": long})),) for long in longs), script.end]


def _with_lines(said: Said, number: int) -> Said:
    values = {"old": old_line(number), "new": new_line(number)}
    if isinstance(said, str):
        return filled(said, values)
    return tuple((name, _filled_values(arguments, values)) for name, arguments in said)


def _filled_values(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _filled_values(item, values) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled_values(item, values) for item in value]
    return filled(value, values) if isinstance(value, str) else value


async def check_harness(context: Context) -> None:
    """Play three sessions: ten edits, a context that is too small for its work, and an engine that fails once."""
    cls = cast("type[HarnessAgent]", context.cls)
    installed, harness = cls.installed, cls.installed.harness
    version = version_of(harness, Path(installed.path))
    about = {"title": harness.title, "version": version, "tried": harness.version}
    report: dict[str, Any] = {**about, "dialect": installed.dialect, "brief": installed.is_brief}
    context.report.harness = report
    server = EndpointServer(context.settings.endpoint)
    play = partial(_play, context, server, cls)
    script = harness.script
    try:
        one, stage = await play(edits_of(script), "ten edits")
        find_problems(context, one)
        report["session"] = session_report(one, stage)
        if wasted := report["session"]["wasted"]:
            context.found("wasted-tokens", "run", f"{wasted} tokens of one session are read again")
        first = report["session"]["first_prompt"]
        for name, say, limits in (
            ("small context", readings_of, {"max_model_len": first + ROOM}),
            ("failing engine", edits_of, {"fails_at": len(edits_of(script)) // 2}),
        ):
            if why := _why_not(context, script, stage, name):
                context.report.skipped.append(f"the session {name!r}: {why}")
                continue
            report[name] = end_report(*await play(say(script), name, **limits))
    finally:
        await server.close()


def _why_not(context: Context, script: Script, first: Stage, name: str) -> str:
    """Return the reason for which a session is left out; "" if it is played."""
    if not first.has_ended:
        return "the first one failed"
    if name == "small context" and not script.read:
        return "the program shows no files to its model by itself"
    return NO_TIME if context.left() <= 0 else ""


async def _play(
    context: Context,
    server: EndpointServer,
    cls: type[HarnessAgent],
    said: Sequence[Said],
    name: str,
    *,
    max_model_len: int = CONTEXT,
    fails_at: int = -1,
) -> tuple[PlayedAgent, Stage]:
    stage, task = Stage(), Task(PROMPT, id=name)
    model = SessionModel(context, task, said, stage, fails_at=fails_at)
    limits: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "episode_timeout_s": max(context.left(), 1.0), "max_episode_tokens": 0}
    one = await play_model(context, server, task, model, name=name, cls=stage.agent(cls), max_model_len=max_model_len, **limits)
    context.report.policies.append(policy_row(name, [one]))
    return one, stage


def session_report(one: PlayedAgent, stage: Stage) -> dict[str, Any]:
    """Return what a session would cost a learner, in JSON's own types."""
    session = one.episode.session
    branches = [history.context for history in session.graph.histories]
    trained = [branch for branch in branches if not branch.masked and not _helper(branch)]
    tools = {tool["function"]["name"]: tool for exchange in session.exchanges for tool in exchange.request.tools}
    rewrites = Counter(change for turn in one.turns for change in rewrites_of(turn, list(tools.values())))
    read = [text for exchange in session.exchanges for text in texts_of(exchange.request.messages[1:])]
    return {
        **end_report(one, stage),
        "edits": stage.num_edits,
        "reads": sum(any(text in part for part in read) for text in (old_line(0), NOTHING)),
        "first_prompt": len(trained[0].turns[0].prompt_ids) if trained else 0,
        "rows": [len(branch.tokens) for branch in trained],
        "sampled": sum(len(turn.token_ids) for branch in trained for turn in branch.turns),
        "wasted": sum(map(repeated_tokens, trained[1:])),
        "helpers": [{"why": _helper(branch), "tokens": len(branch.tokens)} for branch in branches if _helper(branch)],
        "rewritten": dict(rewrites.most_common(MAX_REWRITES)),
    }


def end_report(one: PlayedAgent, stage: Stage) -> dict[str, Any]:
    """Return how a session went and ended, in JSON's own types."""
    session, error = one.episode.session, one.trajectories[0].error
    reasons = Counter(history.context.reason for history in session.graph.histories if history.context.reason)
    return {
        "requests": session.counts["requests"],
        "answered": sum(exchange.answered for exchange in session.exchanges),
        "refused": session.counts["refused"],
        "retries": session.counts["retries"],
        "branches": dict(reasons),
        "ended": stage.has_ended,
        "complete": stage.has_ended and stage.is_complete,
        "error": " ".join(str(one.session.error or error or "").split())[-MAX_ERROR:],
    }


def repeated_tokens(branch: Branch) -> int:
    """Return the tokens that a learner reads again because a conversation goes on in another branch."""
    return 0 if branch.reason in OWN_CONVERSATION else len(branch.turns[0].prompt_ids)


def rewrites_of(turn: Turn, tools: Sequence[Json]) -> Iterator[str]:
    """Name what a client changed in an answer that it sent back."""
    if not turn.rewritten:
        return
    parser = JsonAnswerParser()
    before, after = parser.parse(turn.text, tools).calls, parser.parse(turn.rewritten, tools).calls
    if [name for name, _ in before] != [name for name, _ in after] or not before:
        yield "text"
    for (name, old), (_, new) in zip(before, after, strict=False):
        yield from (f"{name}: {change}" for change in changes(parsed_arguments(old), parsed_arguments(new)))


def changes(old: Any, new: Any) -> Iterator[str]:
    """Name the differences between the arguments of a call before and after."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    for name in sorted({*old, *new}):
        if name not in old:
            yield f"{name} added"
        elif name not in new:
            yield f"{name} dropped"
        elif old[name] != new[name] or type(old[name]) is not type(new[name]):
            yield f"{name} written anew"


def _helper(branch: Branch) -> str:
    return branch.turns[0].helper if branch.turns else ""
