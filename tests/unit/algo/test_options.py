"""Options of algorithms: what built-in ones have, what a decorator makes, and classes of a user's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.compute import compute_policy_loss
from agentrl.algo.corrections import find_correction
from agentrl.algo.estimators import estimator_facts, find_estimator
from agentrl.algo.losses import POLICY_LOSSES, find_loss, loss_facts
from agentrl.algo.plan import AlgoConfig, options_of
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config
from tests.unit.algo.test_own_algorithms import loss_batch, own


def defaults(options: type[Any]) -> dict[str, Any]:
    return dataclasses.asdict(options())


def test_the_options_of_built_in_losses() -> None:
    clip = {name: tuple(defaults(loss_facts(name).options).get(f"eps_clip_{side}") for side in ("low", "high")) for name in POLICY_LOSSES}
    assert clip == {
        **dict.fromkeys(("ppo", "gspo", "cispo", "clip_cov"), (0.2, 0.2)),
        **dict.fromkeys(("reinforce", "sapo", "kl_cov"), (None, None)),
        "dppo_tv": (0.15, 0.15),
        "dppo_kl": (0.05, 0.05),
        "ipo": (0.3, 0.3),
        "gmpo": (0.4, 0.4),
    }
    others = {name: set(defaults(loss_facts(name).options)) - {"eps_clip_low", "eps_clip_high"} for name in POLICY_LOSSES}
    assert {name: names for name, names in others.items() if names} == {
        "ppo": {"dual_clip"},
        "ipo": {"ipo_kl_coef"},
        "sapo": {"sapo_tau_positive", "sapo_tau_negative"},
        "clip_cov": {"cov_share", "clip_cov_range"},
        "kl_cov": {"cov_share", "kl_cov_coef"},
    }


def test_a_decorator_makes_options_of_what_is_stated(tmp_path: Path) -> None:
    def stated(decorator: str) -> dict[str, Any]:
        spec = own(tmp_path, f"@agentrl.{decorator}\ndef mine(inputs, options): ...\n", "mine")
        return defaults((estimator_facts if "estimator" in decorator else loss_facts)(spec).options)

    common = {"advantage_std_norm": True, "reward_clip_range": None}
    assert stated("advantage_estimator(discounts=True)") == common | {"gamma": 1.0}
    assert stated("advantage_estimator(whitens=True)") == common
    assert stated("policy_loss") == {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
    assert stated("policy_loss(clip=(0.1, 0.3))") == {"eps_clip_low": 0.1, "eps_clip_high": 0.3}
    assert stated("policy_loss(clip=None, single_update=True)") == {}


OPTIONS = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Mine:
    tau: float = 0.5
    cov_share: float = 0.25

@agentrl.policy_loss(options=Mine)
def loss(inputs, options):
    return -options.tau * inputs.new * inputs.advantages
"""


def test_options_of_ones_own(tmp_path: Path) -> None:
    spec = own(tmp_path, OPTIONS, "loss")
    function = find_loss(spec)
    assert dataclasses.asdict(options_of(AlgoConfig(), function)) == {"tau": 0.5, "cov_share": 0.25}
    assert options_of(AlgoConfig(options={"cov_share": 0.1, "sapo_tau_positive": 3.0}), function).cov_share == 0.1
    inputs = loss_batch()
    found = compute_policy_loss(spec, inputs, options_of(AlgoConfig(), function))
    assert torch.equal(found.per_token, -0.5 * inputs.new * inputs.advantages)
    with pytest.raises(ConfigError, match=r"--eps-clip-low = 0.1: has no effect on --policy-loss"):
        load_config(["--agent", "module:Name", "--policy-loss", spec, "--eps-clip-low", "0.1"])
    assert load_config(["--agent", "module:Name", "--policy-loss", spec, "--cov-share", "0.1"]).algo.options["cov_share"] == 0.1


@pytest.mark.parametrize(
    ("text", "decorator", "problem"),
    [
        ("class Mine: ...\n", "policy_loss", "is not a dataclass"),
        ("@dataclass\nclass Mine:\n    tau: float = 1.0\n", "policy_loss", "can be changed"),
        ("@dataclass(frozen=True)\nclass Mine:\n    tau: float\n", "off_policy_correction", "has no default for tau"),
        ("@dataclass(frozen=True)\nclass Mine:\n    tau: float = 1.0\n", "advantage_estimator", r"write class Mine\(AdvantageOptions\)"),
        ("class Mine(agentrl.LossOptions):\n    tau: float = 1.0\n", "policy_loss", "is not a dataclass"),
    ],
)
def test_what_is_no_class_of_options_is_refused(tmp_path: Path, text: str, decorator: str, problem: str) -> None:
    text = f"from dataclasses import dataclass\n{text}@agentrl.{decorator}(options=Mine)\ndef mine(inputs, options): ...\n"
    find = {"policy_loss": find_loss, "off_policy_correction": find_correction, "advantage_estimator": find_estimator}[decorator]
    with pytest.raises(ConfigError, match=problem):
        find(own(tmp_path, text, "mine"))


def test_an_estimator_that_discounts_has_a_gamma(tmp_path: Path) -> None:
    text = "@agentrl.advantage_estimator(options=agentrl.AdvantageOptions, discounts=True)\ndef mine(inputs, options): ...\n"
    with pytest.raises(ConfigError, match="has no gamma"):
        find_estimator(own(tmp_path, text, "mine"))
