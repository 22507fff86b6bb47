"""Checks of the methods' results and exceptions: each result that the boundary refuses becomes a finding."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from agentrl.check.context import Context
from agentrl.check.effects import output_size
from agentrl.check.findings import Rule, Severity
from agentrl.check.play import CheckedEpisode, refused_by_template
from agentrl.check.policies import recorded_policy, standard_policies
from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError
from agentrl.core.types import Task

MAX_SHOWN = 60
FIRST_LINE = 300


def _error(name: str, title: str, why: str, remedy: str, snippet: str = "") -> Rule:
    return Rule(id=name, severity=Severity.ERROR, title=title, why=why, remedy=remedy, snippet=snippet)


_FAILS = "The episode fails and is not trained on; if many do, the run stops."

RULES = (
    _error(
        "init-raises",
        "an object of the class cannot be made",
        _FAILS,
        "Make __init__ take no arguments, and move what may fail into reset.",
        "def __init__(self):\n    self.turns = 0",
    ),
    _error("reset-raises", "reset raises", _FAILS, "Make reset work for every task; the message says for which it did not."),
    _error(
        "step-raises",
        "step raises for something that a model may write",
        "A model writes anything at all, above all at the beginning of training. " + _FAILS,
        "Catch what odd text raises, and answer it with a low reward or a message.",
        "try:\n    guess = int(state.action_text)\nexcept ValueError:\n    return StepResult(0.0, terminated=True)",
    ),
    _error(
        "solve-raises",
        "solve raises, or returns something that is not text",
        "The check cannot see what a right answer earns.",
        "Return the text of the right answer for this turn; state holds what step is given, without what was written.",
        "def solve(self, state):\n    return state.label",
    ),
    _error(
        "close-raises",
        "close raises",
        "What it was to release stays open, and every episode logs a warning.",
        "Release only what was opened.",
        "def close(self):\n    if self.file is not None:\n        self.file.close()",
    ),
    _error(
        "timeout",
        "a call takes longer than its deadline",
        _FAILS,
        "Put a deadline on what the call waits for, or raise --timeout-s.",
        "async with asyncio.timeout(5):\n    answer = await client.get(url)",
    ),
    _error(
        "result-type",
        "a method returns something that is no result",
        _FAILS,
        "Return a StepResult (step), a ResetResult or None (reset), or a dictionary.",
        "return StepResult(reward, observation, terminated=done)",
    ),
    _error(
        "result-key",
        "a dictionary lacks a key, or has one that nobody reads",
        _FAILS,
        "Use the keys rewards, scores, environment_feedback, done, sampling_params, extra_logs.",
        'return {"rewards": reward, "environment_feedback": text, "done": done}',
    ),
    _error(
        "reward-type",
        "a reward is not a number",
        "A failure must not be taken for a reward of 0. " + _FAILS,
        "Return one number in every branch.",
        "return StepResult(float(right), terminated=True)",
    ),
    _error(
        "reward-not-finite",
        "a reward is NaN or infinite",
        "One such value would spoil the whole step. " + _FAILS,
        "Guard divisions and logarithms.",
        "reward = hits / total if total else 0.0",
    ),
    _error(
        "score-range",
        "a score is not a number in 0..1",
        "The score says how well the task was done; filters and evaluation rely on its scale. " + _FAILS,
        "Scale it to 0..1, or leave it out; the reward may have any scale.",
        "return StepResult(reward, terminated=True, score=points / max_points)",
    ),
    _error(
        "info-type",
        "info holds something that is not a number",
        "Numbers in info are averaged and logged. " + _FAILS,
        "Return numbers; text belongs into the task's metadata or the log.",
        'info={"solved": 1.0}',
    ),
    _error(
        "observation-missing",
        "there is no observation although the episode goes on",
        "The model has nothing to answer to. " + _FAILS,
        "Return an observation, or terminated=True.",
        'return StepResult(0.0, "Try again.")',
    ),
    _error(
        "observation-type",
        "an observation is neither text nor a list of messages",
        _FAILS,
        "Return text, or messages with role and content.",
        'return StepResult(0.0, [Message(role="tool", content="42")])',
    ),
    _error("observation-too-long", "an observation is longer than a million characters", _FAILS, "Cut it.", "text[:4000]"),
    _error(
        "sampling-invalid",
        "sampling settings are unknown or out of range",
        _FAILS,
        "Return only the settings to change, within their ranges.",
        'sampling={"temperature": 0.7, "max_tokens": 32}',
    ),
    _error("flag-type", "terminated, truncated or done is not a truth value", _FAILS, "Return True or False.", "terminated=bool(done)"),
    _error("images-type", "images are not a list", _FAILS, "Return a list of paths or data URLs.", 'images=["board.png"]'),
    _error(
        "template-refuses",
        "the model's chat template refuses the messages",
        _FAILS,
        "Use roles that this model's template knows, in an order that it allows.",
        'Message(role="user", content=text)',
    ),
)

_FIELDS = {
    "reward": "reward-type",
    "rewards": "reward-type",
    "reward_parts": "reward-type",
    "score": "score-range",
    "scores": "score-range",
    "info": "info-type",
    "extra_logs": "info-type",
    "observation": "observation-type",
    "environment_feedback": "observation-type",
    "sampling": "sampling-invalid",
    "terminated": "flag-type",
    "truncated": "flag-type",
    "done": "flag-type",
    "images": "images-type",
}
_RETURNED = re.compile(r" returned (\w+)")


async def play_standard(context: Context) -> None:
    """Play every policy on some tasks, one episode after another, and report what failed."""
    player, watch = context.player, context.watch
    tasks = spread(context.tasks, context.settings.episodes)
    policies = standard_policies(context.cls, context.tasks)
    if context.recorded:
        policies.append(recorded_policy(context.recorded))
    before = output_size()
    for index, task in enumerate(tasks):  # tasks outside, so that little time still means every policy
        for policy in policies:
            if _hopeless(context.played):
                return
            if context.left(0.3) <= 0:
                context.report.skipped.append("some of the policies' episodes: no time left")
                return
            if policy.name == "recorded" and task.id not in context.recorded:
                continue
            watch.tag = policy.name
            played = await player.play(task, policy, index=index)
            context.played.append(played)
            if played.error is not None:
                context.found(rule_of(played.error, played.method), _method(played), _seen(played))
            _check_close(context)
            if context.close_hangs:
                return
    watch.tag = ""
    written = output_size() - before
    if written:
        context.found("writes-output", "step", f"{written} bytes in {len(context.played)} episodes")


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Up to `count` tasks from all over a list."""
    if len(tasks) <= count:
        return list(tasks)
    return [tasks[index * len(tasks) // count] for index in range(count)]


def rule_of(error: EnvError, method: str) -> str:
    """The rule that an error of the boundary stands for."""
    text = str(error)
    if isinstance(error, EnvTimeoutError):
        return "timeout"
    if refused_by_template(error):
        return "template-refuses"
    if method == "solve":
        return "solve-raises"
    if not isinstance(error, EnvResultError):
        return "init-raises" if ".__init__ raised" in text.partition("\n")[0] else f"{method}-raises"
    found = _RETURNED.search(text)
    field = found.group(1) if found else ""
    return _result_rule(field, text)


def _result_rule(field: str, text: str) -> str:
    if field == "result":
        return "result-key" if "unknown key" in text or "is missing" in text else "result-type"
    if field in ("reward", "rewards") and "must be finite" in text:
        return "reward-not-finite"
    if "the model needs one" in text:
        return "observation-missing"
    if "is longer than" in text:
        return "observation-too-long"
    return _FIELDS.get(field, "result-type")


def _hopeless(played: Sequence[CheckedEpisode]) -> bool:
    """Return True if every episode so far has failed, in which case further deadlines are not waited for."""
    errors = [episode.error for episode in played]
    late = sum(isinstance(error, EnvTimeoutError) for error in errors)
    return (len(errors) >= 8 or late >= 2) and None not in errors


def _method(played: CheckedEpisode) -> str:
    return "__init__" if ".__init__ raised" in str(played.error).partition("\n")[0] else played.method


def _seen(played: CheckedEpisode) -> str:
    """The error, and for which answer it came."""
    text = str(played.error)
    line = text.partition("\n")[0]
    line = line.partition(": ")[2].partition(" ")[2] or line  # without file and method, which are named anyway
    line = line if len(line) <= FIRST_LINE else line[:FIRST_LINE] + "..."
    return f"{line} (task {played.task.id!r}, policy {played.policy!r})"


def _check_close(context: Context) -> None:
    """The boundary only logs what close raises; its call knows."""
    for call in context.watch.calls[-2:]:
        if call.method == "close" and call.done and isinstance(call.error, asyncio.CancelledError):
            context.found("timeout", "close", f"close did not return within {context.player.settings.env.close_timeout_s:g} s")
            context.close_hangs, call.error = True, None
        elif call.method == "close" and call.error is not None and call.done:
            context.found("close-raises", "close", f"{type(call.error).__name__}: {call.error}")
            call.error = None
        elif call.method == "close" and not call.done:
            context.found("timeout", "close", f"close did not return within {context.player.settings.env.close_timeout_s:g} s")
