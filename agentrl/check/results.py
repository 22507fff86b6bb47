"""Checks of the methods' results and exceptions: each result that the boundary refuses becomes a finding."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TypeVar

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.memory import held_bytes
from agentrl.check.play import CheckedEpisode, repeating
from agentrl.check.policies import CALL, FORMS, PLAIN, label_policy, recorded_policy, standard_policies
from agentrl.check.probe import output_size
from agentrl.check.resources import left_processes, running_processes, settled_processes
from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError
from agentrl.core.model_shape import reads_images
from agentrl.core.types import Task
from agentrl.env.isolation.launcher import MIB

T = TypeVar("T")

FIRST_LINE = 300
FORM_TASKS, MIN_FORM_TASKS = 4, 2
REHEARSED = 3
AGAIN = 2
MUCH = 8 * MIB
"""Bytes that an episode leaves behind, if it is played again to see whether they add up."""
TEXT_MATTERS = ("step-raises", "solve-raises", "observation-too-long")

_FIELDS = {
    **dict.fromkeys(("reward", "rewards", "reward_parts", "step_rewards"), "reward-type"),
    **dict.fromkeys(("score", "scores"), "score-range"),
    **dict.fromkeys(("info", "extra_logs"), "info-type"),
    **dict.fromkeys(("observation", "environment_feedback"), "observation-type"),
    **dict.fromkeys(("terminated", "truncated", "done"), "flag-type"),
    "sampling": "sampling-invalid",
    "images": "images-type",
}
SIGNS = {
    "raised EOFError: EOF when reading a line": "reads-input",
    "raised RuntimeError: input(): lost sys.stdin": "reads-input",
    "raised MemoryError": "exceeds-memory",
    "parts for images and there are": "images-broken",
}
"""Beginnings of errors that are no matter of the text, and their rules."""
_RETURNED = re.compile(r" returned (\w+)")


async def play_standard(context: Context) -> None:
    """Play every policy on some tasks, one episode after another, and report what failed."""
    player, watch = context.player, context.watch
    tasks = spread(context.tasks, context.settings.check.episodes)
    context.form = await _label_form(context, tasks)
    if context.close_hangs:
        return
    policies = standard_policies(context.cls, context.tasks, context.form)
    if context.recorded:
        policies.append(recorded_policy(context.recorded))
    before = output_size()
    for index, task in enumerate(tasks):  # tasks outside, so that little time still means every policy
        for policy in policies:
            if _hopeless(context.played):
                return
            if context.played and context.left(0.3) <= 0:
                context.report.skipped.append(f"some of the policies' episodes: {NO_TIME}")
                return
            if policy.name == "recorded" and task.id not in context.recorded:
                continue
            watch.tag = policy.name
            played = await player.play(task, policy, index=index)
            context.played.append(played)
            _report(context, played)
            _check_close(context)
            if context.close_hangs:
                return
    watch.tag = ""
    written = output_size() - before
    if written:
        context.found("writes-output", "step", f"{written} bytes in {len(context.played)} episodes")


async def rehearse(context: Context, task: Task) -> None:
    """Play one episode, and up to two more with other text if `step` fails; report errors that no better text would avoid.

    An exception of `step` may be about the text, and only `report.skipped` names it, except for names and modules that do not exist.
    """
    held, running = held_bytes(), len(running_processes())
    episodes: list[CheckedEpisode] = []
    for policy in standard_policies(context.cls, [task])[:REHEARSED]:
        episodes.append(await context.player.play(task, policy))
        if episodes[-1].error is None or episodes[-1].method == "reset":
            break
    played = episodes[-1] if episodes[-1].error is None else episodes[0]
    _report(context, played)
    raised = [finding for finding in context.report.findings if finding.id in TEXT_MATTERS]
    if raised and not isinstance(getattr(played.error, "__cause__", None), NameError | ImportError | NotImplementedError):
        context.report.findings.remove(raised[0])
        context.report.skipped.append(f"{raised[0].where}: {raised[0].seen}")
    if played.error is None:
        await _look_for_leaks(context, played, held, running)


async def _look_for_leaks(context: Context, played: CheckedEpisode, held: int, running: int) -> None:
    """Play an episode again if it left processes or much memory behind, which it may have meant for all; report what grows."""
    for number in range(AGAIN + 1):
        left, grown = await settled_processes(running) - running, held_bytes() - held
        if left <= 0 and grown < MUCH:
            return
        if number < AGAIN:
            held, running = held + grown, running + left
            await context.player.play(played.task, repeating(played.actions))
    if left > 0:
        context.found("leaks-processes", "close", f"{left} more after each episode{left_processes(context)}")
    else:
        context.found("leaks-memory", "close", f"{grown / MIB:.0f} MiB more after each episode")


def _report(context: Context, played: CheckedEpisode) -> None:
    if played.images is not None:
        method, count = played.images
        if not reads_images(context.settings.model.model):
            context.found("images-unread", method, f"{count} image{'s' * (count != 1)} for the model (task {played.task.id!r})")
        elif played.unreadable:
            context.found("images-broken", method, f"{played.unreadable} (task {played.task.id!r})")
    if played.error is not None:
        method = "__init__" if _raised_in_init(played.error) else played.method
        context.found(rule_of(played.error, played.method), method, _seen(played))


async def _label_form(context: Context, tasks: Sequence[Task]) -> str:
    """Return the form in which the label earns more than the plain label in each of some tasks; without one, the plain form."""
    labelled = [task for task in tasks if task.label is not None][:FORM_TASKS]
    plainly: list[CheckedEpisode] = []
    for task in labelled:
        plainly.append(await context.player.play(task, label_policy(PLAIN)))
        _check_close(context)
        if plainly[-1].error or plainly[-1].score >= 1 or context.close_hangs:  # no time is lost on what hangs
            return PLAIN
    if len(labelled) < MIN_FORM_TASKS:
        return PLAIN
    for form in (CALL, *FORMS):
        for task, before in zip(labelled, plainly, strict=True):
            played = await context.player.play(task, label_policy(form))
            if played.error or played.score <= before.score:
                break
        else:
            return form
    return PLAIN


def spread(items: Sequence[T], count: int) -> list[T]:
    """Up to `count` items from all over a list."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def rule_of(error: EnvError, method: str) -> str:
    """The rule that an error of the boundary stands for."""
    text = str(error)
    if isinstance(error, EnvTimeoutError):
        return "timeout"
    if isinstance(error, EnvResultError) and "chat template" in text:
        return "template-refuses"
    if (known := next((rule for sign, rule in SIGNS.items() if sign in text), None)) is not None:
        return known
    if method == "solve":
        return "solve-raises"
    if not isinstance(error, EnvResultError):
        return "init-raises" if _raised_in_init(error) else f"{method}-raises"
    returned = _RETURNED.search(text)
    field = returned.group(1) if returned else ""
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
    # Each timeout costs its whole deadline, so two of them suffice where other failures need eight.
    return (len(errors) >= 8 or late >= 2) and None not in errors


def _raised_in_init(error: EnvError) -> bool:
    return ".__init__ raised" in str(error).partition("\n")[0]


def _seen(played: CheckedEpisode) -> str:
    """The error, and for which answer it came."""
    text = str(played.error)
    line = text.partition("\n")[0]
    line = line.partition(": ")[2].partition(" ")[2] or line  # without file and method, which are named anyway
    line = line if len(line) <= FIRST_LINE else line[:FIRST_LINE] + "..."
    return f"{line} (task {played.task.id!r}, policy {played.policy!r})"


def _check_close(context: Context) -> None:
    """The boundary only logs what close raises; its call knows."""
    for call in [call for call in context.watch.calls[-2:] if call.method == "close"]:
        cancelled = call.done and isinstance(call.error, asyncio.CancelledError)
        if cancelled or not call.done:
            context.found("timeout", "close", f"close did not return within {context.player.settings.env.close_timeout_s:g} s")
            context.close_hangs |= cancelled
        elif call.error is not None:
            context.found("close-raises", "close", f"{type(call.error).__name__}: {call.error}")
        # The next look covers this call again, and must not report it twice.
        if call.done:
            call.error = None
