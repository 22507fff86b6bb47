"""Hypotheses about answers that are right and not paid, not in the form that is looked for, or cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.check.policies import FORMS, label_text
from agentrl.doctor.evidence import Evidence, PlayedEpisode, normal
from agentrl.doctor.source import Line, bare_comparisons, beginning, label_reads, sources, wanted_forms
from agentrl.doctor.verdicts import Untested, Verdict
from agentrl.evaluation.statistics import Share, share
from agentrl.track.text import counted

MIN_EPISODES = 16
"""Episodes below which no share of them says anything."""
MIN_RIGHT, MIN_HOLDING = 4, 6
"""Answers that are the label, or hold it, below which chance explains that none is paid."""
MOST, NEARLY_ALL = 0.5, 0.75
"""Lower ends of intervals from which a share counts as most, or nearly all."""


def few(evidence: Evidence, least: int = MIN_EPISODES) -> Untested | None:
    """Return that there are fewer recorded episodes than `least`."""
    count = len(evidence.episodes)
    if not count:
        return Untested("no episode is recorded: train with --record all")
    return Untested(f"{counted(count, 'recorded episode')}, at least {least} are needed") if count < least else None


def names(episodes: Sequence[PlayedEpisode]) -> tuple[str, ...]:
    """Return the names of episodes, each once."""
    return tuple(dict.fromkeys(episode.name for episode in episodes))


def is_label(text: str, label: object) -> bool:
    """Return True if a text is the label as a model would write it."""
    return normal(text) in (normal(str(label)), normal(label_text(label)))


def holds_label(text: str, label: object) -> bool:
    """Return True if the label stands in a text as a word of its own; a single letter, which may be a word of the language, only alone."""
    if len(str(label)) == 1 and str(label).isalpha():
        return text.strip(" .()\n") == str(label)
    return re.search(rf"(?<!\w){re.escape(normal(str(label)))}(?!\w)", normal(text)) is not None


def labels_missing(evidence: Evidence) -> Verdict | Untested | None:
    """The reward reads a label, the tasks have none, and nothing is paid."""
    if missing := few(evidence):
        return missing
    without = [episode for episode in evidence.episodes if episode.task.label is None]
    seen, lines = share(len(without), len(evidence.episodes)), label_reads(sources(evidence.run))
    remedy = evidence.warnings.get("no-labels", "")
    if seen.low < MOST or not (remedy or lines) or not all(map(evidence.unpaid, without)):
        return None
    text = f"in {seen.count} of {seen.of} episodes the label is None, and none of them is paid"
    text += "; the run itself warned of it" if remedy else f", and the code reads {lines[0].text}"
    return Verdict(id="labels-missing", seen=text, share=seen, episodes=names(without), where=str(lines[0]) if lines else "", remedy=remedy)


def answers_empty(evidence: Evidence) -> Verdict | Untested | None:
    """The model ends its turn at once before it is trained, and earns nothing so."""
    if missing := few(evidence):
        return missing
    begun = [episode for episode in evidence.episodes if episode.version == evidence.episodes[0].version]
    early = begun if len(begun) >= MIN_EPISODES // 2 else evidence.episodes[:MIN_EPISODES]
    empty = [episode for episode in early if not "".join(episode.texts).strip()]
    seen, unpaid = share(len(empty), len(early)), share(sum(map(evidence.unpaid, empty)), len(empty))
    if seen.low < MOST or unpaid.low < MOST:
        return None
    template = evidence.run.setting("chat_template")
    text = f"{len(empty)} of the first {len(early)} answers have no text: the first token ends the turn"
    remedy = f"Leave out --chat-template {template}: the model was trained on another one." if template else ""
    where = f"--chat-template {template}" if template else ""
    return Verdict(id="answers-empty", seen=text, share=seen, episodes=names(empty), where=where, remedy=remedy)


def label_type(evidence: Evidence) -> Verdict | Untested | None:
    """The text of the label is answered and earns nothing, because the label is of another type."""
    if missing := few(evidence):
        return missing
    right = [
        episode
        for episode in evidence.episodes
        if episode.task.label is not None
        and not isinstance(episode.task.label, str)
        and any(is_label(text, episode.task.label) for text in episode.texts)
    ]
    unpaid = [episode for episode in right if evidence.unpaid(episode)]
    files = sources(evidence.run)
    lines = bare_comparisons(files)
    seen = share(len(unpaid), len(right))
    # Where the source is known, it has to show a comparison that fails for such a label.
    if len(right) < MIN_RIGHT or seen.low < MOST or (files and not lines):
        return None
    kind, first = type(unpaid[0].task.label).__name__, unpaid[0]
    return Verdict(
        id="label-type",
        seen=f"in {len(unpaid)} of {len(evidence.episodes)} episodes str(label) == text, yet the reward is {first.reward:g}; the label is "
        f"{first.task.label!r}, of type {kind}" + (f", and the code says {lines[0].text}" if lines else ""),
        share=seen,
        episodes=names(unpaid),
        where=str(lines[0]) if lines else "",
    )


def format_never_met(evidence: Evidence) -> Verdict | Untested | None:
    """No answer has the form that the environment looks for."""
    return few(evidence) or _unpaid_part(evidence) or _unmet_form(evidence) or _unpaid_label(evidence)


def _unpaid_part(evidence: Evidence) -> Verdict | None:
    """A part of the reward whose name speaks of the form is never paid."""
    for name in dict.fromkeys(name for episode in evidence.episodes for name in episode.parts if "format" in name.lower()):
        own = [episode for episode in evidence.episodes if name in episode.parts]
        if "penal" in name.lower() or any(not evidence.unpaid(episode) for episode in own):
            continue  # 0 is the best that a penalty gives, and a paid answer needs no form
        if len(own) >= MIN_EPISODES and all(episode.parts[name] <= 0.0 for episode in own):
            text = f"the part {name!r} of the reward is 0 or less in each of {len(own)} episodes, such as {_short(own[0].answer)}"
            return Verdict(id="format-never-met", seen=text, share=share(len(own), len(own)), episodes=names(own))
    return None


def _unmet_form(evidence: Evidence) -> Verdict | None:
    """A text that the source or the prompt of each task asks for stands in no answer."""
    lines = asked_forms(evidence)
    unmet = [episode for episode in evidence.episodes if not any(_has_form(episode, line.text) for line in lines)]
    # One answer that is paid without the form shows that nothing asks for it.
    if not lines or len(unmet) < len(evidence.episodes) or not all(map(evidence.unpaid, unmet)):
        return None
    wanted = beginning(lines[0].text)
    return Verdict(
        id="format-never-met",
        seen=f"none of {len(unmet)} answers holds {quoted(wanted)}, which {lines[0].file} asks for; one is {_short(unmet[0].answer)}",
        share=share(len(unmet), len(unmet)),
        episodes=names(unmet),
        where=str(lines[0]) if lines[0].number else "",
    )


def asked_forms(evidence: Evidence) -> list[Line]:
    """Return the forms that the source asks of an answer, else those that every prompt shows."""
    prompted, texts = _prompted(evidence.episodes), [str(episode.task.label) for episode in evidence.episodes]
    shown = {line.text for line in prompted}
    # What a label itself holds is looked for in the label, as the `####` of a worked solution.
    own = [
        line
        for line in wanted_forms(sources(evidence.run))
        if line.text in shown or not all(beginning(line.text) in text for text in texts)
    ]
    return own or prompted


def _prompted(episodes: Sequence[PlayedEpisode]) -> list[Line]:
    """The forms that every prompt shows."""
    return [Line("the prompt", 0, form) for form in FORMS if all(beginning(form) in episode.prompt for episode in episodes)]


def _has_form(episode: PlayedEpisode, form: str) -> bool:
    return any(beginning(form) in text for text in episode.texts)


def _unpaid_label(evidence: Evidence) -> Verdict | None:
    """The label stands in answers, and not one of these is paid."""
    # A label that stands in the prompt may only be quoted in the answer, and proves nothing.
    holding = [
        episode
        for episode in evidence.episodes
        if episode.task.label is not None
        and holds_label(episode.answer, episode.task.label)
        and not holds_label(episode.prompt, episode.task.label)
    ]
    unpaid = [episode for episode in holding if evidence.unpaid(episode)]
    if len(holding) < MIN_HOLDING or len(unpaid) < len(holding):
        return None
    text = f"in {len(holding)} of {len(evidence.episodes)} episodes the label stands in the answer, and none of them is paid: "
    text += f"the label is {holding[0].task.label!r}, the answer {_short(holding[0].answer)}"
    return Verdict(id="format-never-met", seen=text, share=share(len(unpaid), len(holding)), episodes=names(holding))


def _short(text: str, most: int = 60) -> str:
    return quoted(text if len(text) <= most else text[: most - 3] + "...")


def quoted(text: str) -> str:
    """Return a text in quotes, on one line, with its backslashes as they are in the text."""
    return repr(text).replace("\\\\", "\\")


def answers_cut(evidence: Evidence) -> Verdict | Untested | None:
    """The budget of tokens cuts most answers, and these earn less."""
    cut = [episode for episode in evidence.late if episode.cut]
    whole = [episode.reward for episode in evidence.late if not episode.cut]
    if (seen := _cut(evidence, cut)) is None:
        return few(evidence)
    budget = evidence.run.setting("max_new_tokens")
    text = f"--max-new-tokens {budget} cut {len(cut)} of the last {len(evidence.late)} answers, which earned {_mean(cut):.3g} on average"
    text += f"; the {len(whole)} that ended by themselves earned {sum(whole) / len(whole):.3g}" if whole else ""
    remedy = f"Raise --max-new-tokens (now {budget}), or ask for shorter answers."
    return Verdict(id="answers-cut", seen=text, share=seen, episodes=names(cut), where=f"--max-new-tokens {budget}", remedy=remedy)


def turns_cut(evidence: Evidence) -> Verdict | Untested | None:
    """The number of turns ends nearly every episode before the environment does."""
    most = evidence.run.setting("max_turns")
    cut = [episode for episode in evidence.late if episode.stopped and not episode.cut and len(episode.texts) >= (most or 1)]
    seen = _cut(evidence, cut)
    if seen is None or seen.low < NEARLY_ALL:
        return few(evidence)
    text = f"--max-turns {most} ended {len(cut)} of the last {len(evidence.late)} episodes, which earned {_mean(cut):.3g} on average"
    remedy = f"Raise --max-turns (now {most}), or have step return terminated=True earlier."
    return Verdict(id="turns-cut", seen=text, share=seen, episodes=names(cut), where=f"--max-turns {most}", remedy=remedy)


def _cut(evidence: Evidence, cut: Sequence[PlayedEpisode]) -> Share | None:
    """The share of the later episodes that are cut; `None` if it is small, or cut episodes are paid as others are."""
    seen, unpaid = share(len(cut), len(evidence.late)), share(sum(map(evidence.unpaid, cut)), len(cut))
    return seen if len(evidence.late) >= MIN_EPISODES // 2 and seen.low >= MOST and unpaid.low >= MOST else None


def _mean(episodes: Sequence[PlayedEpisode]) -> float:
    return sum(episode.reward for episode in episodes) / len(episodes)


def observations_do_not_fit(evidence: Evidence) -> Verdict | None:
    """Prompts and observations leave no room in the context."""
    counts = [(int(row["step"]), row.get("episode/overflowed", 0.0), row.get("episode/count", 0.0)) for row in evidence.steps]
    seen = share(round(sum(part * count for _, part, count in counts)), round(sum(count for *_, count in counts)))
    if seen.of < MIN_EPISODES or seen.low < MOST / 2:
        return None
    stopped = [episode for episode in evidence.episodes if episode.stopped and not episode.cut]
    text = f"{seen.count} of {seen.of} episodes ended because an observation did not fit into the context"
    steps = tuple(step for step, part, _ in counts if part)
    return Verdict(id="observations-do-not-fit", seen=text, share=seen, episodes=names(stopped), steps=steps)
