"""Rules between the settings of evaluations."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentrl.config.schema import EvalConfig, TrainConfig
from agentrl.core.errors import ConfigError

MEASURES = re.compile(r"eval/(reward|score|pass@([1-9]\d*))(/.+)?")


def _best_is_measured(config: TrainConfig) -> None:
    name, samples = config.eval.keep_best, config.eval.eval_samples
    if not name:
        return
    if not config.eval.eval_every:
        raise ConfigError("--keep-best", name, "is measured by evaluations, and there are none", "Add --eval-every N.")
    measure = MEASURES.fullmatch(name)
    if measure is None:
        raise ConfigError("--keep-best", name, "is no figure of an evaluation", "Use eval/score, eval/reward or eval/pass@1.")
    if measure[2] and int(measure[2]) > samples:
        raise ConfigError("--keep-best", name, f"needs more episodes per task than {samples}", f"Give --eval-samples {measure[2]}.")


def _eval_flags_have_an_evaluation(config: TrainConfig) -> None:
    if config.eval.eval_every or config.eval.eval_at_start:
        return
    for flag, value, default in (
        ("--eval-samples", config.eval.eval_samples, EvalConfig.eval_samples),
        ("--eval-temperature", config.eval.eval_temperature, EvalConfig.eval_temperature),
        ("--eval-by", config.eval.eval_by, EvalConfig.eval_by),
        ("--eval-pass-score", config.eval.eval_pass_score, EvalConfig.eval_pass_score),
    ):
        if value != default:
            raise ConfigError(flag, value, "has no effect without evaluations", "Add --eval-every N.")


EVAL_RULES: tuple[Callable[[TrainConfig], None], ...] = (_best_is_measured, _eval_flags_have_an_evaluation)
