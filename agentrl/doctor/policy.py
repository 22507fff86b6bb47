"""Hypotheses about the updates: another model, tokens that are masked, a policy that broke, and one that does not move."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from agentrl.algo.statistics import SAME
from agentrl.doctor.answers import MOST, names
from agentrl.doctor.evidence import Evidence, JudgedGroup, PlayedEpisode
from agentrl.doctor.verdicts import Untested, Verdict
from agentrl.evaluation.statistics import Estimate, bootstrap_mean, difference_of_means, share
from agentrl.track.text import counted
from agentrl.track.tracker import CLIPPED_SHARE

MIN_STEPS, MIN_MISMATCHED = 4, 2
MIN_TREND_GROUPS = 4
"""Groups at each end of a run below which no trend of the reward is stated."""
MASKED = 0.9
"""Share of masked or clipped tokens from which a step teaches next to nothing."""
FALL_ERRORS = 1.75
"""Half widths of the interval by which a reward must have fallen, since the best of two thirds is the one to compare with."""
CHANGED = 0.1
"""Relative change of the entropy at least, if the updates are to have made the reward fall."""
COLLAPSED, EXPLODED = 0.2, 3.0
"""Entropy at the end as a share of that at the beginning, beyond which the policy broke if the reward does not rise."""
MIN_TOKENS, COMPARED_TOKENS = 16, 32
MOVED = 0.005
"""Nats by which the log-probability of a token changes at least if the updates have an effect; rounding is much less in float32."""
SMALLEST_MOVE = 1e-6
"""Sum of the learning rates of all steps below which no policy changes visibly."""

Prefix: TypeAlias = tuple[int, tuple[int, ...]]
"""Hash of the tokens of a prompt, which may be many, and the sampled tokens so far."""


def ends(groups: Sequence[JudgedGroup]) -> tuple[list[float], list[float]] | None:
    """Return the mean rewards of the groups of the first and the last third; `None` if these are too few to compare."""
    means = [group.mean for group in groups]
    size = len(means) // 3
    return (means[:size], means[-size:]) if size >= MIN_TREND_GROUPS else None


def trend(groups: Sequence[JudgedGroup]) -> Estimate | None:
    """Return the change of the mean reward from the first to the last third of the groups; `None` with too few of them."""
    thirds = ends(groups)
    return None if thirds is None else difference_of_means(*thirds)


def mismatch(evidence: Evidence) -> Verdict | Untested | None:
    """The log-probabilities of engine and learner differ by more than the limit of the run, in several steps."""
    rows = [row for row in evidence.steps if "mismatch/limit" in row and "mismatch/mean" in row]
    if len(rows) < MIN_MISMATCHED:
        return Untested(f"{counted(len(rows), 'step')} with mismatch/mean and its limit, at least {MIN_MISMATCHED} are needed")
    beyond = [row for row in rows if row["mismatch/mean"] > row["mismatch/limit"]]
    if len(beyond) < MIN_MISMATCHED:
        return None
    worst = max(beyond, key=lambda row: row["mismatch/mean"])
    text = (
        f"in {len(beyond)} of {len(rows)} steps they differ by more than {worst['mismatch/limit']:g} nats on average about tokens of the "
    )
    text += f"same weights, most in step {worst['step']:.0f}: {worst['mismatch/mean']:.3g}"
    steps = tuple(int(row["step"]) for row in beyond)
    return Verdict(id="mismatch", seen=text, share=share(len(beyond), len(rows)), steps=steps, episodes=_of_steps(evidence, steps))


def all_masked(evidence: Evidence) -> Verdict | Untested | None:
    """Most steps train on nearly no token, because the loss clips or the correction masks the others."""
    if len(evidence.steps) < MIN_STEPS:
        return Untested(f"{counted(len(evidence.steps), 'step')}, at least {MIN_STEPS} are needed")
    remedies = {
        "off_policy/masked": "Widen --off-policy-range, or lower --max-staleness, so that the data are younger.",
        "policy/clip_fraction": "Take fewer updates per step, a lower --learning-rate, or a wider clip range.",
    }
    for name, remedy in remedies.items():
        values = evidence.column(name)
        steps = tuple(step for step, value in values if value >= MASKED)
        seen = share(len(steps), len(values))
        if len(values) >= MIN_STEPS and seen.low >= MOST:
            text = f"{name} is {MASKED:g} or more in {len(steps)} of {len(values)} steps, {_mean(dict(values), steps):.3g} on average"
            return Verdict(
                id="all-masked", seen=text, share=seen, steps=steps, where=name, remedy=remedy, episodes=_of_steps(evidence, steps)
            )
    return None


def rewards_clipped(evidence: Evidence) -> Verdict | Untested | None:
    """In most steps a good part of the rewards is clipped, so that different ones count the same."""
    values = evidence.column("reward/clipped")
    steps = tuple(step for step, value in values if value >= CLIPPED_SHARE)
    seen = share(len(steps), len(values))
    if len(values) < MIN_STEPS or seen.low < MOST:
        return None
    text = f"reward/clipped is {_mean(dict(values), steps):.3g} on average in {len(steps)} of {len(values)} steps; rewards lie between "
    text += f"{evidence.lowest:g} and {evidence.highest:g}"
    return Verdict(
        id="rewards-clipped", seen=text, share=seen, steps=steps, where="--reward-clip-range", episodes=_of_steps(evidence, steps)
    )


def _mean(values: Mapping[int, float], steps: Sequence[int]) -> float:
    return statistics.fmean(values[step] for step in steps)


def _of_steps(evidence: Evidence, steps: Sequence[int]) -> tuple[str, ...]:
    """Episodes that were begun when one of these steps was next."""
    wanted = set(steps)
    return names([episode for episode in evidence.episodes if episode.version + 1 in wanted])


def policy_broke(evidence: Evidence) -> Verdict | Untested | None:
    """The reward falls, or the entropy collapses or explodes while the reward does not rise."""
    change, entropy = trend(evidence.scored), [value for _, value in evidence.column("entropy")]
    if change is None or len(entropy) < MIN_STEPS:
        return Untested(f"{counted(len(evidence.scored), 'group')} in {counted(len(entropy), 'step')} are too few for a trend")
    size = max(1, len(entropy) // 4)
    before, after = statistics.fmean(entropy[:1]), statistics.fmean(entropy[-size:])
    fell = _fall(evidence.scored) if abs(after - before) > CHANGED * before else None
    high, last = change.high or 0.0, [group.mean for group in evidence.scored[-MIN_TREND_GROUPS:]]
    solved = min(last) >= evidence.highest - SAME > 0.0  # a policy that is sure of right answers may have no entropy
    broken = not COLLAPSED * before <= after <= EXPLODED * before and high <= 0.0 and not solved
    if fell is None and not broken:
        return None
    shown = fell or change
    rate = evidence.run.setting("learning_rate")
    text = f"the mean reward of the groups changed by {shown.value:+.3g} while the entropy went from {before:.3g} to {after:.3g} nats"
    late = [episode for episode in evidence.late if evidence.unpaid(episode)]
    remedy = f"Train again from the first weights with a lower --learning-rate: it is {rate}, try {float(rate) / 10:g}." if rate else ""
    where = f"--learning-rate {rate}" if rate else ""
    return Verdict(id="policy-broke", seen=text, estimate=shown, episodes=names(late), where=where, remedy=remedy)


def _fall(groups: Sequence[JudgedGroup]) -> Estimate | None:
    """The change from the better of the first two thirds to the last, if it is a fall by more than chance; else `None`."""
    means, size = [group.mean for group in groups], len(groups) // 3
    first, middle, last = means[:size], means[size : 2 * size], means[-size:]
    if size < MIN_TREND_GROUPS:
        return None
    fall = difference_of_means(max(first, middle, key=statistics.fmean), last)
    return fall if fall.high is not None and fall.value + FALL_ERRORS * (fall.high - fall.value) < 0.0 else None


def no_effect(evidence: Evidence) -> Verdict | Untested | None:
    """The same tokens after the same prompts keep their log-probabilities over the run, despite gradients."""
    gradients = [value for _, value in evidence.column("grad_norm") if value > 0.0]
    if len(gradients) < MIN_STEPS:
        return Untested(f"{counted(len(gradients), 'step')} with a gradient, at least {MIN_STEPS} are needed")
    size = len(evidence.episodes) // 3
    pairs = _moves(evidence.episodes[:size], evidence.episodes[-size:] if size else [])
    if len(pairs) < MIN_TOKENS:
        return _too_small(evidence) or Untested(
            f"{counted(len(pairs), 'token')} after the same prompt recur, at least {MIN_TOKENS} are needed"
        )
    seen = bootstrap_mean([abs(move) for move, _ in pairs], seed=0)
    noise = [value for _, value in evidence.column("mismatch/mean")]
    # A change below the mismatch of engine and learner cannot be told from it.
    limit = max(MOVED, 1.5 * statistics.fmean(noise)) if noise else MOVED
    if seen.high is None or seen.high >= limit:
        return None
    text = f"the log-probabilities of {len(pairs)} equal tokens after equal prompts changed by {seen.value:.2g} nats on average from the "
    text += f"first to the last third of the run, although {len(gradients)} of {len(evidence.steps)} steps had a gradient"
    rate = evidence.run.setting("learning_rate")
    proof = tuple(dict.fromkeys(name for _, name in pairs))
    return Verdict(id="no-effect", seen=text, estimate=seen, episodes=proof, where=f"--learning-rate {rate}" if rate else "")


def _too_small(evidence: Evidence) -> Verdict | None:
    """The learning rates of all steps add up to nothing: Adam moves a weight by about the rate of a step at most."""
    rates = evidence.column("learning_rate")
    moved = sum(rate for _, rate in rates)
    if not rates or moved >= SMALLEST_MOVE:
        return None
    text = f"the learning rates of {len(rates)} steps add up to {moved:.2g}, by which Adam moves a weight at most; weights are about 0.02"
    steps = tuple(step for step, _ in rates)
    return Verdict(id="no-effect", seen=text, share=share(len(rates), len(rates)), steps=steps, episodes=names(evidence.late))


def _moves(early: Sequence[PlayedEpisode], late: Sequence[PlayedEpisode]) -> list[tuple[float, str]]:
    """Changes of the log-probability of tokens that follow the same tokens early and late, with the later episode; each prefix once."""
    first: dict[Prefix, tuple[float, int]] = {}
    for episode in early:
        for prefix, logprob in _first_turn(episode):
            first.setdefault(prefix, (logprob, episode.version))
    moves: dict[Prefix, tuple[float, str]] = {}
    for episode in late:
        for prefix, logprob in _first_turn(episode):
            if prefix in first and episode.version > first[prefix][1]:
                moves.setdefault(prefix, (logprob - first[prefix][0], episode.name))
    return list(moves.values())


def _first_turn(episode: PlayedEpisode) -> list[tuple[Prefix, float]]:
    """Each of the first tokens with all that stands before it, and its log-probability."""
    turn = episode.record["turns"][0]
    prompt, tokens = hash(tuple(turn["prompt_ids"])), tuple(turn["token_ids"][:COMPARED_TOKENS])
    return [((prompt, tokens[: place + 1]), float(value)) for place, value in enumerate(turn["logprobs"][:COMPARED_TOKENS])]
