import math
from typing import Any

import pytest
import torch

from agentrl.algo.compute import compute_correction
from agentrl.algo.corrections import CORRECTIONS, correction_facts
from agentrl.algo.corrections.ratios import RatioOptions, opsm_keep, second_moment_threshold
from agentrl.algo.off_policy import Correction, CorrectionInputs, interpolate_old
from agentrl.algo.plan import options_of
from agentrl.core.errors import BatchError, ConfigError
from tests.learner_support import algorithm
from tests.unit.algo.chosen import correction_inputs, correction_options

RHO = torch.tensor([0.1, 0.9, 1.0, 3.0, 6.0, 1.0])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])


def inputs_of(rho: torch.Tensor = RHO, advantages: torch.Tensor | None = None) -> CorrectionInputs:
    fresh = torch.tensor([True, False] * 3)[: len(rho)]
    signs = torch.ones(len(rho)) if advantages is None else advantages
    return correction_inputs(rho.log(), torch.zeros(len(rho)), SEQUENCE[: len(rho)], fresh, signs)


def correct(options: RatioOptions, rho: torch.Tensor = RHO, advantages: torch.Tensor | None = None) -> Correction:
    """The options of any built-in correction say all about it, so that one function stands for all."""
    return compute_correction("tis", inputs_of(rho, advantages), options)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("tis", [0.1, 0.9, 1.0, 2.0, 2.0, 1.0]),
        ("seq-tis", [0.09] * 3 + [2.0] * 2 + [1.0]),
        ("icepop", [0.0, 0.9, 1.0, 3.0, 0.0, 1.0]),
        ("decoupled", [0.1, 0.9, 1.0, 3.0, 6.0, 1.0]),
        ("seq-mask-tis", [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        ("none", [1.0] * 6),
    ],
)
def test_presets(preset: str, expected: list[float]) -> None:
    found = compute_correction(preset, inputs_of(), correction_options(preset))
    torch.testing.assert_close(found.weights, torch.tensor(expected))
    assert torch.equal(correct(correction_options(preset)).weights, found.weights)


PRODUCT, GEOMETRIC = 0.09, 0.09 ** (1 / 3)


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [0.1, 0.9, 1.0, 3.0, 4.0, 1.0]),
        ("token", "clip", [0.5, 0.9, 1.0, 3.0, 4.0, 1.0]),
        ("token", "mask", [0.0, 0.9, 1.0, 3.0, 0.0, 1.0]),
        ("seq", "truncate", [PRODUCT] * 3 + [4.0] * 2 + [1.0]),
        ("seq", "clip", [0.5] * 3 + [4.0] * 2 + [1.0]),
        ("seq", "mask", [0.0] * 5 + [1.0]),
        ("geo", "truncate", [GEOMETRIC] * 3 + [4.0] * 2 + [1.0]),
        ("geo", "clip", [0.5] * 3 + [4.0] * 2 + [1.0]),
        ("geo", "mask", [0.0] * 5 + [1.0]),
    ],
)
def test_level_times_mode(level: str, mode: str, expected: list[float]) -> None:
    options = RatioOptions(off_policy_level=level, off_policy_mode=mode, off_policy_range=(0.5, 4.0))  # type: ignore[arg-type]
    torch.testing.assert_close(correct(options).weights, torch.tensor(expected))


def test_kept_sequences_carry_truncated_token_weights() -> None:
    rho = torch.tensor([0.2, 5.0, 1.0, 0.25, 4.0])  # products and geometric means are 1
    kept_by_mean = correct(correction_options("seq-mask-tis"), rho)
    torch.testing.assert_close(kept_by_mean.weights, torch.tensor([0.2, 2.0, 1.0, 0.25, 2.0]))
    kept_by_product = correct(RatioOptions(off_policy_level="seq", off_policy_mode="mask", off_policy_range=(0.5, 3.0)), rho)
    torch.testing.assert_close(kept_by_product.weights, torch.tensor([0.2, 3.0, 1.0, 0.25, 3.0]))


def test_flags_replace_parts_of_a_preset() -> None:
    def chosen(**settings: Any) -> RatioOptions:
        algo = algorithm(**settings)
        options: RatioOptions = options_of(algo, CORRECTIONS[algo.off_policy])
        return options

    options = chosen(off_policy="icepop", off_policy_range=(0.8, 1.25), off_policy_level="geo")
    assert (options.off_policy_level, options.off_policy_mode, options.off_policy_range) == ("geo", "mask", (0.8, 1.25))
    assert chosen(off_policy="icepop") == correction_facts("icepop").options()
    assert chosen(off_policy="opsm", opsm_delta=0.2).opsm_delta == 0.2
    assert chosen(off_policy="m2po", m2po_tau=0.1).m2po_tau == 0.1


def test_interpolation_is_areals_with_its_versions() -> None:
    """AReaL's `compute_prox_logp_approximations` has the proximal policy one version behind the present one, here 5."""
    behaviour, new = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0]), torch.tensor([-1.5, -1.0, -3.0, -2.0, -3.0])
    versions = torch.tensor([3, 1, 2, 4, 5])
    found = interpolate_old(new, behaviour, versions, proximal=4, current=5)
    alpha = torch.tensor([1 / 2, 3 / 4, 2 / 3, 0.0, 0.0])
    torch.testing.assert_close(found, behaviour + alpha * (new - behaviour))


@pytest.mark.parametrize("done", [0.25, 0.5, 0.75])
def test_interpolation_is_exact_where_log_probabilities_change_at_a_constant_rate(done: float) -> None:
    rate, versions, step = torch.tensor([0.3, -0.2, 0.1]), torch.tensor([2, 5, 7]), 7
    start = torch.tensor([-1.0, -2.0, -3.0])
    behaviour, old, new = (start + rate * (when - 2) for when in (versions, torch.tensor(step), torch.tensor(step + done)))
    found = interpolate_old(new, behaviour, versions, proximal=step, current=step + done)
    torch.testing.assert_close(found, old)
    assert torch.equal(interpolate_old(old, behaviour, versions - 1, proximal=step, current=step), old)


def test_opsm_drops_drifted_failures_only() -> None:
    behaviour = torch.zeros(6)
    new = torch.tensor([-0.3, 0.1, -0.1, -0.2, -0.2, -0.01])  # mean drifts 0.1, 0.2, 0.01
    fresh = torch.ones(6, dtype=torch.bool)
    failures = correction_inputs(new, behaviour, SEQUENCE, fresh, -torch.ones(6))
    negative = opsm_keep(failures, 0.15)
    assert negative.tolist() == [True, True, True, False, False, True]
    assert opsm_keep(correction_inputs(new, behaviour, SEQUENCE, fresh, torch.ones(6)), 0.15).all()
    correction = compute_correction("opsm", failures, correction_options("opsm", opsm_delta=0.15))
    assert correction.keep.tolist() == negative.tolist()
    assert correction.weights[3:5].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tau", [0.001, 0.04, 0.5, 3.0])
def test_m2po_masks_as_little_as_the_bound_allows(tau: float) -> None:
    log_rho = torch.randn(500, generator=torch.Generator().manual_seed(1))
    bound = float(second_moment_threshold(log_rho, tau))
    kept = log_rho.abs().double() <= bound
    assert float(log_rho[kept].double().square().mean()) <= tau
    if not kept.all():
        following = log_rho[~kept].abs().min()
        one_more = log_rho.abs() <= following
        assert float(log_rho[one_more].double().square().mean()) > tau * (1 - 1e-4)
    else:
        assert math.isinf(bound)


def test_m2po_correction_keeps_everything_when_nearly_on_policy() -> None:
    near = correct(correction_options("m2po"), torch.full((6,), 1.01))
    assert near.keep.all()
    far = correct(correction_options("m2po"))
    assert far.keep.tolist() == [False, True, True, False, False, True]


def test_diagnostics() -> None:
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    stats = correct(correction_options("icepop"), advantages=advantages).stats.result()
    assert stats["rho/mean"] == pytest.approx(12.0 / 6)
    assert stats["rho/max"] == pytest.approx(6.0)
    assert stats["ess/rho"] == pytest.approx(12.0**2 / (6 * (0.01 + 0.81 + 1 + 9 + 36 + 1)), rel=1e-5)
    weights = torch.tensor([0.0, 0.9, 1.0, 3.0, 0.0, 1.0])
    assert stats["ess/weights"] == pytest.approx(float(weights.sum() ** 2 / (6 * weights.square().sum())), rel=1e-5)
    assert stats["off_policy/masked"] == pytest.approx(2 / 6)
    assert stats["off_policy/masked_positive"] == pytest.approx(1 / 2)
    assert stats["off_policy/masked_negative"] == pytest.approx(1 / 3)
    assert stats["off_policy/bounded"] == 0.0
    fresh, stale = RHO[::2].double(), RHO[1::2].double()
    assert stats["mismatch/max"] == pytest.approx(math.log(10.0), rel=1e-5)
    assert stats["mismatch/mean"] == pytest.approx(float(fresh.log().abs().mean()), rel=1e-5)
    assert stats["mismatch/kl"] == pytest.approx(float((fresh - 1 - fresh.log()).mean()), rel=1e-5)
    assert stats["staleness/kl"] == pytest.approx(float((stale - 1 - stale.log()).mean()), rel=1e-5)
    assert stats["staleness/fraction"] == 0.5


def test_bounded_counts_tokens_whose_weight_a_bound_changed() -> None:
    assert correct(correction_options("tis")).stats.result()["off_policy/bounded"] == pytest.approx(2 / 6)
    clip = RatioOptions(off_policy_mode="clip", off_policy_range=(0.5, 4.0))
    assert correct(clip).stats.result()["off_policy/bounded"] == pytest.approx(2 / 6)
    sequences = RatioOptions(off_policy_level="seq", off_policy_range=(0.0, 4.0))
    assert correct(sequences).stats.result()["off_policy/bounded"] == pytest.approx(2 / 6)
    assert correct(correction_options("none")).stats.result()["off_policy/bounded"] == 0.0


def test_the_99th_percentile_is_right_to_half_a_per_cent() -> None:
    log_rho = 0.3 * torch.randn(5000, generator=torch.Generator().manual_seed(0))
    inputs = correction_inputs(log_rho, torch.zeros(5000), torch.arange(5000), torch.ones(5000, dtype=torch.bool), torch.ones(5000))
    correction = compute_correction("tis", inputs, correction_options("tis"))
    exact = float(torch.quantile(log_rho.exp(), 0.99))
    assert correction.stats.result()["rho/p99"] == pytest.approx(exact, rel=0.006)


def test_everything_masked_is_reported_as_no_effective_sample() -> None:
    stats = correct(RatioOptions(off_policy_mode="mask", off_policy_range=(50.0, 60.0))).stats.result()
    assert stats["ess/weights"] == 0.0
    assert stats["off_policy/masked"] == 1.0


def test_same_policy_means_weight_one_and_full_sample() -> None:
    for preset in CORRECTIONS:
        correction = compute_correction(preset, inputs_of(torch.ones(6), -torch.ones(6)), correction_options(preset))
        assert correction.weights.tolist() == [1.0] * 6
        stats = correction.stats.result()
        assert (stats["ess/rho"], stats["rho/p99"], stats["mismatch/max"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("preset", CORRECTIONS)
def test_an_empty_rank_works(preset: str) -> None:
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    correction = compute_correction(preset, correction_inputs(empty, empty, none, none.bool(), empty), correction_options(preset))
    assert correction.stats.result() == {}


def test_extreme_ratios_stay_finite() -> None:
    old, behaviour = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    flat = torch.zeros(2, dtype=torch.long)
    for preset in CORRECTIONS:
        inputs = correction_inputs(old, behaviour, flat, flat.bool(), torch.ones(2))
        correction = compute_correction(preset, inputs, correction_options(preset))
        assert correction.weights.isfinite().all()
        assert all(math.isfinite(value) for value in correction.stats.result().values())


def test_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"--off-policy = 'tsi'.*icepop"):
        compute_correction("tsi", inputs_of(), RatioOptions())
    with pytest.raises(ConfigError, match="--off-policy-range"):
        correction_options("icepop", off_policy_range=(2.0, 1.0))
    with pytest.raises(ConfigError, match="--off-policy-level"):
        correction_options("tis", off_policy_level="episode")
    with pytest.raises(ConfigError, match="--off-policy-mode"):
        correction_options("tis", off_policy_mode="drop")
    with pytest.raises(BatchError, match="advantages has shape"):
        inputs_of(advantages=torch.ones(5))
