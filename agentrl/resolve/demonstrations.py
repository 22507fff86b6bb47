"""``--sft-data``: the settings of the demonstrations that a run of reinforcement learning imitates beside its episodes."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qsl

from agentrl.config.mapping import from_mapping
from agentrl.config.methods import METHODS
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed, settings_of
from agentrl.config.tune import SftConfig
from agentrl.core.errors import ConfigError
from agentrl.core.settings import flag, refuse_set
from agentrl.resolve.tune_rules import check_data

FLAG = "--sft-data"
SECTIONS = ("data", "method")
OWN = ("data", "eval_data", "eval_split", "eval_size", "loss", "packing")
"""Settings of these sections that rows do not depend on, or that the flag sets itself."""


def demonstrations(config: TrainConfig) -> SftConfig | None:
    """Return the settings of ``agentrl sft`` for the demonstrations of a run, with its model, its images and its seed; `None` without any.

    Raises:
        ConfigError: If one is no setting of rows, or has a wrong value.
    """
    sources, _, options = config.algo.sft_data.partition("#")
    if not sources:
        return None
    table = settings_of(SftConfig)
    given = dict(parse_qsl(options, keep_blank_values=True))
    for name, value in given.items():
        if name in table and name != "batch_size" and (table[name].section not in SECTIONS or name in OWN):
            remedy = "Leave it out; docs/recipes.md names those that may follow #."
            raise ConfigError(FLAG, f"{name}={value}", "is no setting of the rows of agentrl sft", remedy)
    sft = from_mapping(SftConfig, {**given, "data": sources, "eval_size": 0}, source=FLAG, command="sft")
    return changed(replace(sft, model=config.model, images=config.images), seed=config.run.seed)


def check_demonstrations(config: TrainConfig) -> None:
    """Refuse demonstrations that cannot be imitated, as far as that is known before they are read.

    Raises:
        ConfigError: If a file or a setting is wrong.
    """
    sft = demonstrations(config)
    if sft is None:
        refuse_set(config.algo, ("sft_coef",), f"has no effect without {FLAG}", f"Give {FLAG} FILE, or leave it out.")
        return
    try:
        check_data(METHODS["sft"], sft)
    except ConfigError as error:
        name = FLAG if error.field == flag("data") else f"{FLAG}: {error.field.removeprefix('--').replace('-', '_')}"
        raise ConfigError(name, error.value, error.problem, error.remedy) from None
    rows, updates = sft.optim.batch_size, config.algo.mini_batches
    if rows < updates:
        problem = f"are too few for the {updates} updates of a step"
        raise ConfigError(f"{FLAG}: batch_size", rows, problem, f"Use at least {updates}, or fewer --mini-batches.")
