"""Checks of the text that the model reads: length, control tokens, repetition, and labels that stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

from agentrl.check.context import Context
from agentrl.check.play import CheckedEpisode, plain
from agentrl.check.policies import PLAIN, label_text
from agentrl.check.speed import percentile
from agentrl.core.errors import EnvResultError
from agentrl.rollout.codecs import encode_prompt

MAX_PROMPTS = 256
HUGE_SHARE = 0.25
REPEATED_CHARS = 20
MIN_LABELLED, MIN_LABELS = 4, 3
LABEL_SCORE = 0.5
IDLE = ("empty", "random text")
"""Policies that do nothing to earn the answer."""

TOKEN = re.compile(r"\w+|[^\w\s]")


def check_text(context: Context) -> None:
    """Check prompts and observations that were seen so far."""
    _check_prompts(context)
    for played in context.good():
        if played.policy != "control tokens":
            _check_control(context, played)
            _check_history(context, played)
        _check_size(context, played)


def _check_prompts(context: Context) -> None:
    lengths = [(played.first_tokens, played.task.id) for played in context.played if played.first_tokens]
    if not lengths or not any(played.raw_first or played.first != plain(played.task.prompt) for played in context.played):
        lengths += list(_task_prompts(context))
    limit, budget = context.settings.engine.max_model_len, context.settings.rollout.max_new_tokens
    if not lengths:
        return
    tokens = [count for count, _ in lengths]
    context.report.prompts = {"min": min(tokens), "p50": percentile(tokens, 0.5), "max": max(tokens), "max_model_len": limit}
    most, task = max(lengths)
    if limit and most >= limit:
        context.found("prompt-too-long", "reset", f"the prompt of task {task!r} has {most} tokens, the context {limit} ({_model(context)})")
    elif limit and most + min(budget, limit // 2) > limit:
        room = limit - most
        seen = f"the prompt of task {task!r} has {most} tokens, which leaves {room} for answers of {budget}"
        context.found("prompt-near-limit", "reset", f"{seen} ({_model(context)})")


def _task_prompts(context: Context) -> Iterator[tuple[int, str]]:
    chat = context.settings.data.apply_chat_template
    for task in context.tasks[:MAX_PROMPTS]:
        try:
            yield len(encode_prompt(context.player.codec, task.prompt, apply_chat_template=chat)), task.id
        except EnvResultError as error:
            context.found("template-refuses", "tasks", f"task {task.id!r}: {error}")
            return


def _model(context: Context) -> str:
    return "of the bundled tiny model" if context.settings.bundled_model else "of --model"


def _check_control(context: Context, played: CheckedEpisode) -> None:
    """Text in messages must not spell control tokens; raw text must, where it follows a turn."""
    if not played.raw_first and (token := context.player.codec.control_in(played.first)):
        context.found("control-tokens", "reset", f"{token!r} in the first prompt of task {played.task.id!r}")
    for turn in played.turns[:-1] if played.over else played.turns:
        is_raw = isinstance(turn.result.observation, str)
        token = context.player.codec.control_in(turn.text)
        if is_raw and not token:
            context.found("raw-observation", "step", f"{turn.text[:60]!r}")
        elif not is_raw and token and token not in turn.action:
            context.found("control-tokens", "step", f"{token!r} in {turn.text[:60]!r}")


def _check_history(context: Context, played: CheckedEpisode) -> None:
    """An observation that holds the one before it and the action between them, or three that grow."""
    texts = [turn.text for turn in played.turns]
    for before, turn, text in zip(texts, played.turns[1:], texts[1:], strict=False):
        # A short answer, or one that the observation before holds too, may stand in the next one by chance.
        both = len(before) >= REPEATED_CHARS and before in text and len(turn.action) > 2 and turn.action in text
        if both and turn.action not in before:
            seen = f"an observation of {len(text)} characters holds the one before it and the answer to that"
            context.found("repeats-history", "step", seen)
            return
    for one, two, three in zip(texts, texts[1:], texts[2:], strict=False):
        grows = len(one) >= REPEATED_CHARS and len(one) < len(two) < len(three) and two.startswith(one) and three.startswith(two)
        if grows:
            seen = f"observations of {len(one)}, {len(two)} and {len(three)} characters, each beginning with the one before"
            context.found("repeats-history", "step", seen)
            return


def _check_size(context: Context, played: CheckedEpisode) -> None:
    limit = context.settings.engine.max_model_len
    for turn in played.turns:
        # An answer that is only quoted back is no long observation; quoting may change its punctuation.
        echoed = played.policy in ("long", "copy") and re.sub(r"\W", "", turn.action[:50]) in re.sub(r"\W", "", turn.text)
        if limit and not turn.opens and turn.num_tokens >= HUGE_SHARE * limit and not echoed:
            context.found("observation-huge", "step", f"{turn.num_tokens} tokens of a context of {limit} ({_model(context)})")
            return


def check_leaks(context: Context) -> None:
    """Compare what was read before the last turn with the labels."""
    right = [played.score for played in context.good() if played.policy in (PLAIN, context.form, "solve")]
    if not right or fmean(right) < LABEL_SCORE or context.report.has("copy-solves", "constant-solves", "reward-constant"):
        return
    idle = list({played.task.id: played for played in context.good() if played.policy in IDLE}.values())
    labelled = [played for played in idle if isinstance(played.task.label, str | int | float) and label_text(played.task.label).strip()]
    if len(labelled) < MIN_LABELLED or len({label_text(played.task.label) for played in labelled}) < MIN_LABELS:
        return
    # The texts of the last turn may tell the answer, because no action follows them.
    read = ["\n".join(turn.text for turn in (played.turns[:-1] if played.over else played.turns)) for played in labelled]
    for method, texts in (("reset", [played.first for played in labelled]), ("step", read)):
        places = [set(_places(text, label_text(played.task.label).strip())) for text, played in zip(texts, labelled, strict=True)]
        if common := set.intersection(*places):
            example = f"{labelled[0].task.label!r} in {texts[0][-80:]!r}"
            context.found("label-leaks", method, f"in each of {len(labelled)} tasks the label is {min(common, key=len)}, as {example}")
            return


def _places(text: str, label: str) -> Iterator[str]:
    """Yield descriptions of the label's positions that fit other tasks too."""
    for match in re.finditer(rf"(?<!\w){re.escape(label)}(?!\w)", text):
        before, after = TOKEN.findall(text[: match.start()]), TOKEN.findall(text[match.end() :])
        yield f"word {len(before) + 1}"
        yield f"followed by {len(after)} words"
        if before and before.count(before[-1]) + after.count(before[-1]) == 1:
            yield f"what follows {before[-1]!r}"
