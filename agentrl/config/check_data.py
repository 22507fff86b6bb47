"""Rules between the settings that say where tasks come from."""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from pathlib import Path

from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError


def prompts_exist(config: TrainConfig) -> None:
    """Files that are named are there."""
    for flag, sources in (("--prompts", config.data.prompt_sources), ("--eval-prompts", config.data.eval_sources)):
        for name in sources:
            path = Path(name).expanduser()
            if name.endswith((".jsonl", ".json", ".ndjson", ".parquet")) and not path.exists():
                raise ConfigError(flag, name, "no such file", f"Looked for {path.absolute()}.")


def probabilities_fit(config: TrainConfig) -> None:
    """There is one positive number per data set."""
    given, sources = config.data.prompt_probs, config.data.prompt_sources
    if not given:
        return
    try:
        weights = config.data.prompt_weights
    except ValueError:
        raise ConfigError("--prompt-probs", given, "is not a list of numbers", "Write, for example, 0.7,0.3.") from None
    if len(weights) != len(sources):
        problem = f"has {len(weights)} number{'s' * (len(weights) != 1)} for {len(sources)} data set{'s' * (len(sources) != 1)}"
        raise ConfigError("--prompt-probs", given, problem, "Give one for each of --prompts, with commas between them.")
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError("--prompt-probs", given, "must hold numbers above 0", "Leave out the data set that is not to be used.")


def template_has_one_place(config: TrainConfig) -> None:
    """The prompt has exactly one place in the template."""
    template = config.data.input_template
    if not template:
        return
    if not config.data.prompt_sources and not config.data.eval_sources:
        raise ConfigError("--input-template", template, "has no effect without a data set", "Give --prompts, or leave it out.")
    try:
        places = [(name, form, conversion) for _, name, form, conversion in string.Formatter().parse(template) if name is not None]
    except ValueError:
        places = []
    if places != [("", "", None)]:
        problem = "must hold {} exactly once, where the prompt goes"
        raise ConfigError("--input-template", template, problem, "Write {{ and }} for braces that are meant as such.")


DATA_RULES: tuple[Callable[[TrainConfig], None], ...] = (prompts_exist, probabilities_fit, template_has_one_place)
