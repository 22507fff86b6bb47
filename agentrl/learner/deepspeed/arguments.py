"""Further settings of DeepSpeed, ``--deepspeed-args name=value``: read by their names, and checked against those that training sets."""

from __future__ import annotations

from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.named_args import parse_named_args
from agentrl.core.plugins import suggest
from agentrl.learner.plan import LearnerConfig

FLAG = "--deepspeed-args"

ARGUMENTS: dict[str, Any] = {
    "zero_hpz_partition_size": int,
    "zero_quantized_weights": bool,
    "zero_quantized_gradients": bool,
    "communication_data_type": str,
    "deepcompile": bool,
}
"""Arguments, named as in DeepSpeed's configuration, with the types of their values."""
OF_ZERO_3 = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
ON_GPU = ("zero_quantized_weights", "zero_quantized_gradients", "deepcompile")


def arguments(learner: LearnerConfig) -> dict[str, Any]:
    """Return the arguments by name; those that change nothing are left out."""
    given = parse_named_args(learner.deepspeed_args)
    # A partition of one rank is none. True equals 1, so the kinds are told apart.
    return {name: value for name, value in given.items() if value is not False and (name, value) != ("zero_hpz_partition_size", 1)}


def check_arguments(learner: LearnerConfig) -> None:
    """Check the names of the arguments and the types of their values.

    Raises:
        ConfigError: For the first one that is wrong.
    """
    for name, value in parse_named_args(learner.deepspeed_args).items():
        if name not in ARGUMENTS:
            raise ConfigError(
                FLAG, name, "is no argument that can be set", suggest(name, ARGUMENTS) or f"Choose of {', '.join(ARGUMENTS)}."
            )
        kind = ARGUMENTS[name]
        if not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)) or (kind is int and value < 1):
            wanted = {int: "an integer from 1", str: "a data type, such as fp32", bool: "true or false"}[kind]
            raise ConfigError(FLAG, f"{name}={value}", f"must be {wanted}", "Correct the value.")


def hpz_size(learner: LearnerConfig) -> int:
    """Return the number of ranks, those of one machine, that also hold the whole parameters among themselves."""
    size: int = arguments(learner).get("zero_hpz_partition_size", 1)
    return size
