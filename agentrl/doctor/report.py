"""The report of an examination, for people."""

from __future__ import annotations

import shlex

from agentrl.check.report import COLOURS
from agentrl.doctor.verdicts import MAX_SHOWN, Examination, Outcome, Verdict
from agentrl.evaluation.statistics import Estimate
from agentrl.track.text import Screen, counted

STYLES = {Outcome.LEARNING: "bold green", Outcome.CAUSES: "bold red", Outcome.UNDECIDED: "bold yellow"}


def print_examination(screen: Screen, examination: Examination) -> None:
    """Print the outcome, the trend, and each cause with its evidence, its remedy and commands to look at it."""
    screen.line((str(examination.outcome), STYLES[examination.outcome]), f": {_read(examination)}", prose=True)
    screen.line(trend_text(examination), prose=True)
    for number, verdict in enumerate(examination.verdicts, start=1):
        screen.line()
        _print_verdict(screen, verdict, number, examination.run)
    for advice in examination.advice:
        screen.line()
        screen.line(("advice ", "bold"), f"{advice.id}: {advice.seen}. {advice.remedy}", prose=True)
    if examination.untested:
        screen.line()
    for cause, reason in examination.untested.items():
        screen.line((f"not tested: {cause}: {reason}", "dim"), prose=True)


def _read(examination: Examination) -> str:
    read = f"{counted(examination.steps, 'step')}, {counted(examination.groups, 'group')}, "
    read += f"{counted(examination.episodes, 'recorded episode')} read"
    return f"{counted(len(examination.verdicts), 'cause')} in {read}" if examination.verdicts else read


def trend_text(examination: Examination) -> str:
    """Return the change of the reward over the run in a sentence."""
    trend = examination.trend
    if trend is None:
        return "The groups are too few to tell whether the reward rises."
    if trend.low == trend.high == 0.0:
        return f"The reward is {examination.last:.3g} in the first third of the groups and in the last."
    change = f"from {examination.first:.3g} in the first third of the groups to {examination.last:.3g} in the last ({_interval(trend)})"
    if examination.rising:
        return f"The reward rises {change}."
    falls = trend.high is not None and trend.high < 0.0
    return f"The reward {'falls' if falls else 'went'} {change}{'' if falls else ', which may be chance'}."


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.3g}"
    return f"{estimate.value:+.3g}, 95 % interval {estimate.low:+.3g} to {estimate.high:+.3g}"


def _print_verdict(screen: Screen, verdict: Verdict, number: int, run: str) -> None:
    rule = verdict.rule
    screen.line((f"{number}. {rule.severity} ", COLOURS[rule.severity]), (verdict.id, "bold"), f": {rule.title}", prose=True)
    place = f": {verdict.where}" if verdict.where not in verdict.seen else ""
    rows = [("seen", verdict.seen + place), ("sure", _certainty(verdict))]
    rows += [("why", rule.why), ("fix", verdict.change), ("replay", verdict.paid)]
    rows += [("steps", ", ".join(map(str, verdict.steps[:MAX_SHOWN])) + _more(len(verdict.steps)))]
    rows += [("proof", shlex.join(["agentrl", "inspect", run, name])) for name in verdict.episodes[:MAX_SHOWN]]
    for label, text in rows:
        if text:
            screen.line((f"{label:<7}", "dim"), text, indent=3, prose=label not in ("proof",))
    if len(verdict.episodes) > MAX_SHOWN:
        screen.line(f"and {len(verdict.episodes) - MAX_SHOWN} more (--json names them all)", indent=10)


def _more(count: int) -> str:
    return f" and {count - MAX_SHOWN} more" if count > MAX_SHOWN else ""


def _certainty(verdict: Verdict) -> str:
    if verdict.share is not None:
        found = verdict.share
        return f"{found.count} of {found.of}, {found.value:.0%}; 95 % interval {found.low:.0%} to {found.high:.0%}"
    return "" if verdict.estimate is None else f"{_interval(verdict.estimate)}, n = {verdict.estimate.tasks}"
