"""Checks that an environment can be learned from: rewards differ, episodes end, no answer is right for every question."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.play import SOLVER, CheckedEpisode, PolicyInput, TextPolicy
from agentrl.check.policies import COMMON, bracketed, constant_answers, label_texts, options_in, words_of, written
from agentrl.check.results import spread
from agentrl.check.shortcuts import check_shortcuts
from agentrl.core.types import Task
from agentrl.env.multi_agent import named_agents

ROUNDS = ((4, 64), (16, 6), (64, 1))
"""Tasks that the constant answers are tried on, and how many answers get so far."""

MIN_TASKS = 4
SOLVED, ERRORS = 0.5, 3.0
CONSTANTS_S = 10.0
SEARCH_EPISODES, SEARCH_TURNS, SEARCH_S = 400, 4, 10.0
FLAT_SHARE = 0.9
LEAST_EPISODES, LEAST_GROUPS = 8, 4
"""Episodes, and tasks, from which all of them are judged."""
SAME = 1e-9
DEALS = 99


async def check_learning(context: Context) -> None:
    """Try constant answers and a search, then judge all episodes that were played."""
    context.watch.tag = ""
    if reason := in_the_way(context):
        context.report.skipped.append(f"whether there is something to learn: {reason}")
    else:
        await _try_constants(context)
        everything = [*context.good(), *context.searched]
        if _range(everything) <= SAME or not any(played.over for played in everything):
            await _search(context)
            everything = [*context.good(), *context.searched]
        _judge(context, everything)
        await check_shortcuts(context)
    for name in dict.fromkeys(played.policy for played in context.played):
        played = [episode for episode in context.played if episode.policy == name]
        row, good = policy_row(name, played), [episode for episode in played if episode.good]
        if several := [agent for agent in played[0].agents if agent]:
            earned = {agent: ([one.rewards[agent] for one in good], [one.scores[agent] for one in good]) for agent in several}
            row["agents"] = {agent: _earned(*both) for agent, both in earned.items()}
        context.report.policies.append(row)


def in_the_way(context: Context) -> str:
    """Return the reason not to play hundreds of further episodes; empty if there is none."""
    if any(played.error is not None for played in context.played):
        return "some episodes failed"
    leaks = [finding.id for finding in context.report.findings if finding.id.startswith("leaks-")]
    return f"every episode {leaks[0].replace('-', ' ')}" if leaks else ""


def _judge(context: Context, everything: Sequence[CheckedEpisode]) -> None:
    if len(everything) >= LEAST_EPISODES and _range(everything) <= SAME:
        blind = not words_of(context.cls) and all(task.label is None for task in context.tasks)
        rule = "reward-unseen" if blind else "reward-constant"
        rewards = (f"{f'{agent} ' * bool(agent)}{reward:g}" for agent, reward in everything[0].rewards.items())
        context.found(rule, "step", f"{', '.join(rewards)} in each of {len(everything)} episodes")
    elif len(ranges := _ranges(context)) >= LEAST_GROUPS and (flat := _mean([float(one <= SAME) for one in ranges])) >= FLAT_SHARE:
        context.found("flat-groups", "step", f"{flat:.0%} of {len(ranges)} tasks")
    if everything and not any(played.over for played in everything):
        turns = max(len(played.turns) for played in everything)
        seen = f"none of {len(everything)} episodes, of {context.settings.rollout.max_turns} to {turns} turns, came to an end"
        context.found("never-ends", "step", seen)
    earned = [(reward, played) for played in everything for reward in played.rewards.values()]
    if not earned:
        return
    highest, best = max(earned, key=lambda item: item[0])
    if highest > 1 + SAME and not best.turns[-1].scores:
        context.found("score-clipped", "step", f"an episode earned {highest:g}")
    _judge_copy(context)
    _judge_solve(context)


def _judge_solve(context: Context) -> None:
    """In each task the answer of `solve` must earn the most of all policies, and more than nothing; chance may beat it."""
    if context.report.has("nondeterministic", "group-differs"):
        return
    solved = {played.task.id: played for played in context.good() if played.policy == SOLVER.name}
    if not solved:
        return
    rivals = [played for played in (*context.good(), *context.searched) if played.task.id in solved]
    beaten = [played for played in rivals if played.score > solved[played.task.id].score + SAME]
    if beaten:
        own, other = solved[beaten[0].task.id], beaten[0]
        seen = f"in task {own.task.id!r} it scored {own.score:g}, and policy {other.policy!r} {other.score:g}"
        context.found("solve-fails", "solve", seen)
        return
    score, constant = _mean([played.score for played in solved.values()]), context.report.constant
    if score <= SAME:
        context.found("solve-fails", "solve", f"it scored 0 in each of {len(solved)} tasks")
    elif constant and score <= constant["score"] + SAME and not context.report.has("constant-solves", "reward-constant"):
        context.found("solve-fails", "solve", f"its mean score is {score:.2f}, and so is that of always answering {constant['answer']!r}")


def _judge_copy(context: Context) -> None:
    copies = [played.score for played in context.good() if played.policy == "copy"]
    rivals = context.report.has("constant-solves", "reward-constant")
    if len(copies) >= MIN_TASKS and _lower(copies) >= SOLVED and not rivals and _answers_matter(context):
        context.found("copy-solves", "step", f"mean score {_mean(copies):.2f} over {len(copies)} tasks")


async def _try_constants(context: Context) -> None:
    """Successive halving: every answer on few tasks, the best on more."""
    answers = constant_answers(context.cls, context.tasks, context.form)
    scores: dict[str, dict[str, float]] = {answer: {} for answer in answers}
    stop = time.monotonic() + min(context.left(0.8), CONSTANTS_S)
    for count, keep in ROUNDS:
        answers = sorted(answers, key=lambda answer: -_mean(scores[answer].values()))[:keep]
        for answer in answers:
            for task in spread(context.tasks, count):
                if task.id in scores[answer]:
                    continue
                if time.monotonic() > stop:
                    reason = NO_TIME if context.left(0.8) <= 0 else f"there are more than {CONSTANTS_S:g} s allow"
                    context.report.skipped.append(f"some constant answers: {reason}")
                    return
                played = await context.player.play(task, _always(answer))
                if played.good:
                    scores[answer][task.id] = played.score
                    context.searched.append(played)
        tried = scores[answers[0]]
        if len(tried) >= len(context.tasks):
            break
    _judge_constant(context, scores)


def _always(answer: str) -> TextPolicy:
    return TextPolicy("constant", lambda given: answer)


def _judge_constant(context: Context, scores: dict[str, dict[str, float]]) -> None:
    most = max(map(len, scores.values()))
    if not most:
        return
    best = max((answer for answer in scores if len(scores[answer]) == most), key=lambda answer: _mean(scores[answer].values()))
    values = list(scores[best].values())
    context.report.constant = {"answer": best, "score": _mean(values), "tasks": len(values)}
    several = bool(named_agents(context.cls))  # one answer for every agent is a meeting of two, not a weakness of the task
    if not several and len(values) >= MIN_TASKS and _lower(values) >= SOLVED and _answers_matter(context):
        quoted = repr(best if len(best) <= 60 else best[:57] + "...") if best else "the empty answer"
        context.found("constant-solves", "step", f"{quoted} has the mean score {_mean(values):.2f} over {len(values)} tasks")


def _answers_matter(context: Context) -> bool:
    """Return True if scores differ between answers, or policies, by more than when the scores of each task are dealt out at random."""
    dealt: dict[str, list[tuple[str, float]]] = {}
    for played in (*context.good(), *context.searched):
        who = played.actions[0] if played.policy == "constant" else f"policy {played.policy}"
        dealt.setdefault(played.task.id, []).append((who, played.score))
    rng, spreads = Random(context.settings.run.seed), []
    for shuffled in (False, *[True] * DEALS):
        groups: dict[str, list[float]] = {}
        for items in dealt.values():
            scores = [score for _, score in items]
            for (who, _), score in zip(items, rng.sample(scores, len(scores)) if shuffled else scores, strict=True):
                groups.setdefault(who, []).append(score)
        # The overall mean is the same in every deal, so this sum orders deals as the variance between groups does.
        spreads.append(math.fsum(len(group) * _mean(group) ** 2 for group in groups.values()))
    # More than in all of 99 random deals: one in a hundred by chance.
    return spreads[0] > max(spreads[1:]) + SAME


async def _search(context: Context) -> None:
    """Look for a reward or an end: go back to where few have been, by the same actions, and play on at random."""
    rng, stop = Random(context.settings.run.seed), time.monotonic() + min(context.left(0.9), SEARCH_S)
    words = [*words_of(context.cls), *label_texts(context.tasks)]
    task = context.tasks[0]
    visited: dict[str, tuple[int, list[str]]] = {"": (0, [])}
    for number in range(SEARCH_EPISODES):
        if time.monotonic() > stop:
            return
        text, (count, prefix) = min(visited.items(), key=lambda item: (item[1][0], rng.random()))
        visited[text] = (count + 1, prefix)
        played = await _explore(context, task, list(prefix), words, number)
        if played.good:
            context.searched.append(played)
        for turn_number, turn in enumerate(played.turns):
            if turn.text and not turn.result.terminated and turn.text not in visited:
                visited[turn.text] = (0, played.actions[: turn_number + 1])
        everything = [*context.good(), *context.searched]
        if any(episode.over for episode in everything) and _range(everything) > SAME:
            return


async def _explore(context: Context, task: Task, prefix: list[str], words: Sequence[str], number: int) -> CheckedEpisode:
    def act(given: PolicyInput) -> str:
        if given.turn < len(prefix):
            return prefix[given.turn]
        forms = bracketed(given.first, given.rng)
        return written(context.form, given.rng.choice(words or forms or options_in(given.text) or COMMON))

    turns = min(SEARCH_TURNS * context.settings.rollout.max_turns, len(prefix) + context.settings.rollout.max_turns)
    return await context.player.play(task, TextPolicy("search", act), index=number, max_turns=turns)


def _ranges(context: Context) -> list[float]:
    """Return for each task that random policies played more than once how far their rewards are apart."""
    groups: dict[str, list[CheckedEpisode]] = {}
    for played in context.good():
        if played.policy.startswith("random") or played.policy in ("empty", "copy"):
            groups.setdefault(played.task.id, []).append(played)
    return [_range(group) for group in groups.values() if len(group) > 1]


class Played(Protocol):
    """A played episode, as far as its row in the report goes."""

    @property
    def good(self) -> bool:
        """True if it did not fail."""

    @property
    def finished(self) -> bool:
        """True if it ended by itself."""

    @property
    def turns(self) -> Sequence[Any]:
        """The turns."""

    @property
    def reward(self) -> float:
        """The reward."""

    @property
    def score(self) -> float:
        """The score."""


def policy_row(name: str, played: Sequence[Played]) -> dict[str, Any]:
    """Return the row of a policy in the report's table of rewards."""
    good = [one for one in played if one.good]
    return {
        "policy": name,
        "episodes": len(played),
        "failed": len(played) - len(good),
        "finished": sum(one.finished for one in good),
        "turns": _mean([len(one.turns) for one in good]),
        **_earned([one.reward for one in good], [one.score for one in good]),
    }


def _earned(rewards: Sequence[float], scores: Sequence[float]) -> dict[str, float]:
    lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
    return {"reward": _mean(rewards), "reward_min": lowest, "reward_max": highest, "score": _mean(scores)}


def _range(played: Sequence[CheckedEpisode]) -> float:
    """Return the largest difference between an agent's rewards in two episodes."""
    rewards = [[one.rewards[agent] for one in played] for agent in (played[0].agents if played else ())]
    return max((max(own) - min(own) for own in rewards), default=0.0)


def _mean(values: Any) -> float:
    items = list(values)
    return math.fsum(items) / len(items) if items else 0.0


def _lower(values: Sequence[float]) -> float:
    """Mean less `ERRORS` standard errors."""
    mean = _mean(values)
    return mean - ERRORS * math.sqrt(_mean([(value - mean) ** 2 for value in values]) / len(values))
