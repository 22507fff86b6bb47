"""Hypotheses about the reward: it depends on length only, pays one answer everywhere, copies or repetition, or is the same for all."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from agentrl.algo.statistics import SAME
from agentrl.check.policies import FORMS, PLAIN, label_text, written
from agentrl.doctor.answers import MOST, NEARLY_ALL, few, holds_label, names
from agentrl.doctor.evidence import Evidence, JudgedGroup, PlayedEpisode, normal
from agentrl.doctor.verdicts import Untested, Verdict
from agentrl.evaluation.statistics import difference_of_means, rank_correlation, share
from agentrl.track.text import counted

MIN_SIZES, MIN_LENGTH_EPISODES = 4, 24
EQUAL, RANKS = 0.85, 0.95
"""Lower ends of intervals from which a length decides the reward: of the share of equal pairs, and of the rank correlation."""
CHANCE = 0.6
"""Share of pairs with equal rewards by chance above which equal rewards prove nothing."""
MIN_PROMPTS, MIN_LABELS, MIN_ALIKE = 8, 4, 8
MIN_GROUPS = 12
COPIED_CHARS, COPIED_SHARE = 12, 0.5
_REPEATED = re.compile(r"(?<!\S)(\S+(?: \S+){0,3})(?: \1){3,}(?!\S)")

SIZES: Mapping[str, Callable[[PlayedEpisode], int]] = {
    "characters": lambda episode: sum(len(text.strip()) for text in episode.texts),
    "words": lambda episode: sum(len(text.split()) for text in episode.texts),
    "tokens": lambda episode: episode.tokens,
}


def length_only(evidence: Evidence) -> Verdict | Untested | None:
    """Answers of one length earn the same whatever they say, and those of other lengths something else."""
    # Copies and repetition have hypotheses of their own, and both come with length.
    own = [episode for episode in evidence.episodes if not _copies(episode) and not _repeats(episode.answer)]
    if missing := few(evidence, MIN_LENGTH_EPISODES):
        return missing
    if len(own) < MIN_LENGTH_EPISODES or min(_texts_by_level(own)) < MIN_ALIKE or _labels_explain(evidence):
        return None
    return next(filter(None, (_by_length(own, unit) or _by_rank(own, unit) for unit in SIZES)), None)


def _texts_by_level(episodes: Sequence[PlayedEpisode]) -> tuple[int, int]:
    """Different answers below and above the mean reward; a length explains nothing where one answer is all that is paid."""
    mean = sum(episode.reward for episode in episodes) / len(episodes)
    low, high = ({episode.texts for episode in episodes if (episode.reward > mean) is paid} for paid in (False, True))
    return len(low), len(high)


def _labels_explain(evidence: Evidence) -> bool:
    """Return True if nearly all answers with a high reward hold their label: then length is a consequence."""
    middle = (evidence.lowest + evidence.highest) / 2
    paid = [episode for episode in evidence.episodes if episode.task.label is not None and episode.reward > middle]
    return len(paid) >= MIN_ALIKE and share(sum(holds_label(each.answer, each.task.label) for each in paid), len(paid)).value >= NEARLY_ALL


def _by_length(episodes: Sequence[PlayedEpisode], unit: str) -> Verdict | None:
    by_size: dict[int, list[PlayedEpisode]] = defaultdict(list)
    for episode in episodes:
        by_size[SIZES[unit](episode)].append(episode)
    pairs = [pair for own in by_size.values() for pair in _different_pairs(own)]
    equal = [pair for pair in pairs if _same_reward(*pair)]
    seen = share(len(equal), len(pairs))
    if len(by_size) < MIN_SIZES or seen.low < EQUAL or _equal_by_chance(episodes) > CHANCE:
        return None
    text = f"in {len(equal)} of {len(pairs)} pairs of different answers with equally many {unit} the rewards are equal, and by chance in "
    text += f"{_equal_by_chance(episodes):.0%}"
    return Verdict(id="length-only", seen=text, share=seen, episodes=names([episode for pair in equal for episode in pair]))


def _different_pairs(episodes: Sequence[PlayedEpisode]) -> list[tuple[PlayedEpisode, PlayedEpisode]]:
    """Pairs of different answers, each episode in one at most, so that the pairs are independent."""
    ordered = sorted(episodes, key=lambda episode: normal(" ".join(episode.texts)))
    # Neighbours in this order are alike, so each answer is paired with one half the list away.
    middle = (len(ordered) + 1) // 2
    return [(one, two) for one, two in zip(ordered, ordered[middle:], strict=False) if one.texts != two.texts]


def _same_reward(one: PlayedEpisode, two: PlayedEpisode) -> bool:
    return abs(one.reward - two.reward) <= SAME * max(1.0, abs(one.reward))


def _equal_by_chance(episodes: Sequence[PlayedEpisode]) -> float:
    """Chance that two episodes earned the same."""
    counts: dict[float, int] = defaultdict(int)
    for episode in episodes:
        counts[round(episode.reward, 6)] += 1
    return sum((count / len(episodes)) ** 2 for count in counts.values())


def _by_rank(episodes: Sequence[PlayedEpisode], unit: str) -> Verdict | None:
    sizes = [SIZES[unit](episode) for episode in episodes]
    seen = rank_correlation(sizes, [episode.reward for episode in episodes])
    # The weaker end of the interval counts, and nothing if the interval holds 0.
    strength = min(abs(seen.low or 0.0), abs(seen.high or 0.0)) if (seen.low or 0.0) * (seen.high or 0.0) > 0 else 0.0
    if len(set(sizes)) < MIN_SIZES or strength < RANKS:
        return None
    text = f"the rank correlation of the reward with the number of {unit} is {seen.value:.3f} over {seen.tasks} episodes"
    return Verdict(id="length-only", seen=text, estimate=seen, episodes=names(episodes))


def right_earns_less(evidence: Evidence) -> Verdict | Untested | None:
    """Answers that are the label earn less than other answers of the same form."""
    if missing := few(evidence):
        return missing
    labelled = [episode for episode in evidence.episodes if episode.task.label is not None]
    for form in (PLAIN, *FORMS):
        # Only what looks like a label is compared, because a form of its own may be paid or not.
        wanted = {id(episode): normal(written(form, label_text(episode.task.label))) for episode in labelled}
        shapes = set(map(_shape, wanted.values()))
        own = [episode for episode in labelled if _shape(normal(episode.answer)) in shapes]
        right = [episode for episode in own if normal(episode.answer) == wanted[id(episode)]]
        wrong = [episode for episode in own if normal(episode.answer) != wanted[id(episode)]]
        if min(len(right), len(wrong)) < MIN_ALIKE:
            continue
        gap = difference_of_means([episode.reward for episode in wrong], [episode.reward for episode in right])
        if gap.high is not None and gap.high < 0.0 and not any(episode.reward > evidence.lowest + SAME for episode in right):
            means = [sum(episode.reward for episode in part) / len(part) for part in (right, wrong)]
            text = f"{len(right)} answers that are the label earned {means[0]:.3g} on average, {len(wrong)} others {means[1]:.3g}; one is "
            text += f"{right[0].answer!r}, with the label {right[0].task.label!r}"
            return Verdict(id="right-earns-less", seen=text, estimate=gap, episodes=names(right))
    return None


def _shape(text: str) -> str:
    """A text with each number as 0, and each word as a."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", text))


def one_answer_wins(evidence: Evidence) -> Verdict | Untested | None:
    """The same answer earns the highest reward in tasks with different labels, and other answers earn less."""
    if missing := few(evidence):
        return missing
    by_answer: dict[str, list[PlayedEpisode]] = defaultdict(list)
    for episode in evidence.episodes:
        by_answer[normal("\n".join(episode.texts))].append(episode)
    for answer, own in sorted(by_answer.items(), key=lambda item: -len(item[1])):
        labels = {repr(episode.task.label) for episode in own if episode.task.label is not None}
        prompts = {episode.prompt for episode in own}
        highest = share(sum(episode.reward >= evidence.highest - SAME for episode in own), len(own))
        if len(prompts) < MIN_PROMPTS or 0 < len(labels) < MIN_LABELS or highest.low < NEARLY_ALL or not _earn_more(evidence, own):
            continue
        shown = repr(answer if len(answer) <= 60 else answer[:57] + "...")
        text = f"the answer {shown} earned {evidence.highest:g}, the most there is, in {highest.count} of {len(own)} episodes with it, "
        text += f"in {len(prompts)} different tasks" + (f" with {len(labels)} different labels" if labels else "")
        return Verdict(id="one-answer-wins", seen=text, share=highest, episodes=names(own))
    return None


def copying_wins(evidence: Evidence) -> Verdict | Untested | None:
    """Answers that hold a good part of the prompt earn more, where the label does not stand in the prompt."""
    own = [episode for episode in evidence.episodes if _copies(episode)]
    return few(evidence) or _wins(evidence, own, "copying-wins", "repeat at least half of their prompt")


def repetition_wins(evidence: Evidence) -> Verdict | Untested | None:
    """Answers that say the same words again and again earn more."""
    own = [episode for episode in evidence.episodes if _repeats(episode.answer)]
    return few(evidence) or _wins(evidence, own, "repetition-wins", "say the same words four times or more in a row")


def _wins(evidence: Evidence, own: Sequence[PlayedEpisode], cause: str, does: str) -> Verdict | None:
    if len(own) < MIN_ALIKE or not _earn_more(evidence, own):
        return None
    others = _others(evidence, own)
    gain = difference_of_means([episode.reward for episode in others], [episode.reward for episode in own])
    means = [sum(episode.reward for episode in part) / len(part) for part in (own, others)]
    if means[0] <= (evidence.lowest + evidence.highest) / 2:
        return None
    text = f"{len(own)} answers that {does} earned {means[0]:.3g} on average, the {len(others)} others {means[1]:.3g}"
    return Verdict(id=cause, seen=text, estimate=gain, episodes=names(own))


def _others(evidence: Evidence, own: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
    known = {id(episode) for episode in own}
    return [episode for episode in evidence.episodes if id(episode) not in known]


def _earn_more(evidence: Evidence, own: Sequence[PlayedEpisode]) -> bool:
    """Return True if some episodes earned more than all others, by more than chance."""
    others = _others(evidence, own)
    if min(len(own), len(others)) < MIN_ALIKE:
        return False
    gain = difference_of_means([episode.reward for episode in others], [episode.reward for episode in own])
    return gain.low is not None and gain.low > 0.0


def _copies(episode: PlayedEpisode) -> bool:
    answer, prompt, label = normal(episode.answer), normal(episode.prompt), episode.task.label
    if len(answer) < COPIED_CHARS or (label is not None and normal(str(label)) in prompt):
        return False
    last = normal(episode.prompt.rpartition("\n")[2])  # a chat's question stands last
    return any(asked and (asked in answer or (answer in asked and len(answer) >= COPIED_SHARE * len(asked))) for asked in (prompt, last))


def _repeats(text: str) -> bool:
    words = normal(text)
    repeated = sum(len(match.group()) for match in _REPEATED.finditer(words))
    return bool(words) and repeated >= MOST * len(words)


def too_hard(evidence: Evidence) -> Verdict | Untested | None:
    """Every group is flat, at nothing."""
    groups = _later_groups(evidence)
    return groups if isinstance(groups, Untested) else _flat(evidence, groups, "too-hard") if _level(groups) <= SAME else None


def too_easy(evidence: Evidence) -> Verdict | Untested | None:
    """Every group is flat at a reward above nothing, from the beginning on."""
    groups = _later_groups(evidence)
    if isinstance(groups, Untested):
        return groups
    early = evidence.scored[: len(evidence.scored) // 3]
    solved_later = share(sum(group.flat for group in early), len(early)).value < MOST
    return None if _level(groups) <= SAME or solved_later else _flat(evidence, groups, "too-easy")


def _later_groups(evidence: Evidence) -> list[JudgedGroup] | Untested:
    groups = [group for group in evidence.scored if len(group.rewards) > 1]
    if len(groups) < MIN_GROUPS:
        return Untested(f"{counted(len(groups), 'group')}, at least {MIN_GROUPS} are needed")
    return groups[-max(MIN_GROUPS, len(groups) // 2) :]


def _level(groups: Sequence[JudgedGroup]) -> float:
    return sum(group.mean for group in groups) / len(groups)


def _flat(evidence: Evidence, groups: Sequence[JudgedGroup], cause: str) -> Verdict | None:
    flat = [group for group in groups if group.flat]
    seen = share(len(flat), len(groups))
    differ = any(abs(one.mean - two.mean) > SAME for one, two in itertools.pairwise(groups))
    if seen.low < NEARLY_ALL or (differ and not evidence.compares_groups):
        return None
    text = f"in {len(flat)} of the last {len(groups)} groups all members earned the same, {_level(groups):.3g} on average"
    numbers = {group.number for group in flat}
    return Verdict(id=cause, seen=text, share=seen, episodes=names([one for one in evidence.episodes if one.group in numbers]))
