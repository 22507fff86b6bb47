"""Checks of answers that must not pay as much as the right one: none, the right one among wrong ones, and one action again and again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentrl.check.context import Context
from agentrl.check.play import CheckedEpisode, PolicyInput, TextPolicy
from agentrl.check.policies import CALL, label_text, label_texts, words_of, written
from agentrl.check.results import spread

MIN_TASKS, SAME = 4, 1e-9
TASKS, ACTIONS = 8, 6
"""Tasks that are played again at most, and actions that are repeated in each."""
MIN_PAID = 3
"""Turns in a row that an action must be paid for to count as one that can be repeated."""
IDLE = ("empty", "random text", "copy")
_WORDS = re.compile(r"[\w .,:%$/+-]{1,40}")
_LISTED = re.compile(r"(?:[\w-]+, ){2,}[\w-]+")
_NAMED = re.compile(r"\b[A-Z]{3,}\b")


async def check_shortcuts(context: Context) -> None:
    """Compare the label with answers that know nothing, then play it among wrong ones, and repeat actions that were paid."""
    if context.report.has("nondeterministic", "group-differs", "reward-constant", "reward-unseen", "constant-solves"):
        return
    _judge_label(context)
    if context.report.has("label-loses"):
        return
    await _hide_label(context)
    await _repeat_actions(context)


def _judge_label(context: Context) -> None:
    """The label must earn more than answers that do not know it; what `solve` writes is judged elsewhere."""
    if callable(getattr(context.cls, "solve", None)):
        return
    # A long label may be the tests of a program, and no answer.
    own = {played.task.id: played for played in _first_turns(context, context.form) if _WORDS.fullmatch(_label(played))}
    others = {name: {played.task.id: played for played in _first_turns(context, name)} for name in IDLE}
    common = [task for task in own if all(task in rivals for rivals in others.values())]
    if len(common) < MIN_TASKS:
        return
    right = _mean([own[task].reward for task in common])
    gains = {name: [rivals[task].reward - own[task].reward for task in common] for name, rivals in others.items()}
    best = max(gains, key=lambda name: sum(gains[name]))
    alike = right > SAME and all(abs(gain) <= SAME for more in gains.values() for gain in more)
    # In some tasks more and in none less: a reward of chance does not do that.
    loses = any(min(gains[name]) >= -SAME and sum(gain > SAME for gain in gains[name]) >= MIN_TASKS for name in IDLE[:2])
    if loses or alike:
        other = right + _mean(gains[best])
        seen = f"the label earned {right:.3g} on average over {len(common)} tasks, policy {best!r} {other:.3g}"
        context.found("label-loses", "step", seen)


def _first_turns(context: Context, policy: str) -> list[CheckedEpisode]:
    return [played for played in context.good() if played.policy == policy and len(played.turns) == 1]


def _label(played: CheckedEpisode) -> str:
    label = played.task.label
    return label_text(label) if isinstance(label, str | int | float) else ""


async def _hide_label(context: Context) -> None:
    """Write the label between wrong ones, which must earn less than the label alone."""
    right = [played for played in context.good() if played.policy == context.form and played.score > SAME and _label(played).strip()]
    several, answers = label_texts(context.tasks), []
    if context.form == CALL:
        return
    for own in spread(list({played.task.id: played for played in right}.values()), TASKS):
        label = _label(own)
        wrong = [text for text in several if text.lower() not in label.lower() and label.lower() not in text.lower()]
        offered = [word for words in _LISTED.findall(own.first) for word in words.split(", ")]
        if label in offered:  # other answers may count for nothing
            wrong = [text for text in offered if text != label]
        if not wrong or context.left(0.8) <= 0:
            continue
        text = written(context.form, f"{wrong[0]} {label} {wrong[-1]}")
        played = await context.player.play(own.task, TextPolicy("label among others", _always(text)))
        if not played.good or played.score < own.score - SAME:
            return
        answers.append(text)
    if len(answers) >= MIN_TASKS:
        context.found("label-contained", "step", f"{answers[0]!r} and its like score as much as the label in each of {len(answers)} tasks")


async def _repeat_actions(context: Context) -> None:
    """Repeat single actions, none of which may earn more than every episode that came to its end."""
    finished = [played for played in (*context.good(), *context.searched) if played.finished and played.reward > SAME]
    for own in spread(list({played.task.id: played for played in finished}.values()), TASKS // 2):
        best = max(played.reward for played in finished if played.task.id == own.task.id)
        for action in _actions(context, own):
            if context.left(0.8) <= 0:
                return
            played = await context.player.play(own.task, TextPolicy("repeated", _always(action)))
            paid = [turn.result.reward for turn in played.turns if turn.result.reward > SAME]
            if played.good and len(paid) >= MIN_PAID and len(paid) >= len(played.turns) - 1 and played.reward > best + SAME:
                seen = f"{action[:60]!r} in each of {len(played.turns)} turns earned {played.reward:.3g} in task {own.task.id!r}"
                context.found("reward-repeats", "step", f"{seen}, and the best episode that ended by itself {best:.3g}")
                return


def _actions(context: Context, own: CheckedEpisode) -> Sequence[str]:
    """Actions to repeat in a task: those that were paid and did not end it, and the words in capitals of its prompt."""
    turns = [turn for played in context.good() if played.task.id == own.task.id for turn in played.turns]
    paid = [turn.action for turn in turns if turn.result.reward > SAME and not turn.result.terminated]
    return list(dict.fromkeys([*paid, *words_of(context.cls), *_NAMED.findall(own.first)]))[:ACTIONS]


def _always(text: str) -> Callable[[PolicyInput], str]:
    return lambda given: text


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
