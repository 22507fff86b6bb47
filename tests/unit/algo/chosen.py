"""Options of an algorithm that is named, or in a user's file."""

from __future__ import annotations

from typing import Any

from agentrl.algo.corrections import correction_facts
from agentrl.algo.estimators import estimator_facts
from agentrl.algo.losses import loss_facts
from agentrl.algo.off_policy import CorrectionInputs
from agentrl.algo.options import option_names


def estimator_options(name: str, **values: Any) -> Any:
    """The options of an estimator, with those of the values that it has an option for."""
    return _options(estimator_facts(name).options, values)


def loss_options(name: str, **values: Any) -> Any:
    """The same for a policy loss."""
    return _options(loss_facts(name).options, values)


def correction_options(name: str, **values: Any) -> Any:
    """The same for an off-policy correction."""
    return _options(correction_facts(name).options, values)


def _options(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**{name: values[name] for name in option_names(kind) if name in values})


def correction_inputs(old: Any, behaviour: Any, sequence: Any, same_version: Any, advantages: Any) -> CorrectionInputs:
    """The inputs of a correction, in the order of their fields."""
    return CorrectionInputs(old=old, behaviour=behaviour, sequence=sequence, same_version=same_version, advantages=advantages)
