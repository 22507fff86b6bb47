"""Estimators of the KL divergence from a reference policy, and the controller of its coefficient.

Definitions: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from agentrl.core.errors import ConfigError

KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "k1": lambda d: d,
        "k2": lambda d: 0.5 * d.square(),
        # expm1, because exp(-d) - 1 in float32 loses every digit where the policies are close
        "k3": lambda d: (-d.clamp(-20.0, 20.0)).expm1() + d,
    }
)


def approximate_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL divergence per action token, with ``d = logprobs - reference``, clamped to +-10.

    ``k1 = d``: unbiased, noisy, may be negative. ``k2 = d^2 / 2``: biased, small variance, the right gradient in a
    loss. ``k3 = exp(-d) - 1 + d``: unbiased, never negative.

    Args:
        logprobs: Of the policy, with gradient if used in the loss. # [A]
        reference: Of the reference policy. # [A]
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        One estimate per token. # [A]
    """
    if estimator not in KL_ESTIMATORS:
        raise ConfigError("--kl-estimator", estimator, "is not a KL estimator", f"Choose one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](logprobs - reference).clamp(-10.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KLController:
    """The coefficient of the KL penalty: fixed, or steered towards a target (arXiv:1909.08593, section 2.2)."""

    coefficient: float  # the one in force
    target: float | None = None  # KL divergence to hold; `None` keeps the coefficient fixed
    horizon: float = 10_000.0  # episodes over which an error of 20 % or more changes the coefficient by 20 %

    def update(self, kl: float, episodes: int) -> KLController:
        """Return the controller after a step of so many episodes, with this mean KL divergence per action token."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1.0 + error * episodes / self.horizon))
