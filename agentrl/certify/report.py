"""The certificate of a model, for people."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.certify.results import Certificate, Comparison, Verdict
from agentrl.track.text import Screen, count, counted, duration

COLOURS = {Verdict.EXACT: "green", Verdict.WRONG: "bold red", Verdict.UNTRIED: "yellow"}
COLUMNS = ("part", "compared", "verdict", "log-prob#", "gradient#", "reason")


def print_certificate(screen: Screen, certificate: Certificate) -> None:
    """Print the table of comparisons, and a line with what follows from it."""
    twin = f"{counted(certificate.layers, 'layer')}, {count(certificate.parameters)} parameters"
    screen.line(f"{certificate.model} ({certificate.model_type}), twin of {twin}, {duration(certificate.seconds)}")
    screen.table(COLUMNS, [_row(comparison) for comparison in certificate.comparisons])
    screen.line((f"{certificate.verdict}", COLOURS[certificate.verdict]), f": {conclusion(certificate)}", prose=True)
    for comparison in certificate.wrong:
        screen.line(f"{comparison.name}: {comparison.remedy}", indent=2, prose=True)


def _row(comparison: Comparison) -> Sequence[str | tuple[str, str]]:
    errors = (figure(comparison.logprob), figure(comparison.gradient))
    verdict = (str(comparison.verdict), COLOURS[comparison.verdict])
    return comparison.part, comparison.name, verdict, *errors, comparison.reason


def figure(error: float | None) -> str:
    """Return an error as people read it."""
    return "" if error is None else "0" if error == 0 else f"{error:.0e}"


def conclusion(certificate: Certificate) -> str:
    """Return the consequences of a certificate in a sentence."""
    if certificate.verdict is Verdict.WRONG:
        return f"{counted(len(certificate.wrong), 'comparison')} failed; do not train with these"
    if certificate.verdict is Verdict.UNTRIED:
        return "no layout of the learner can be tried with this model"
    exact = [each for each in certificate.comparisons if each.verdict is Verdict.EXACT]
    return f"{counted(len(exact), 'comparison')} agree with the model up to rounding in float32"
