"""An off-policy correction of a user's own file: the same as a built-in one, and refused with the remedy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from agentrl.algo.compute import compute_correction
from agentrl.algo.off_policy import CorrectionInputs
from agentrl.algo.options import NoOptions
from agentrl.core.errors import PluginError
from tests.unit.algo.chosen import correction_options
from tests.unit.algo.test_own_algorithms import EXAMPLE, own


def correction_batch() -> CorrectionInputs:
    draw = torch.Generator().manual_seed(4)
    old, step, advantages = (torch.randn(64, generator=draw) for _ in range(3))
    rows = torch.arange(64) // 8
    return CorrectionInputs(old=old, behaviour=old + 0.4 * step, sequence=rows, same_version=rows < 4, advantages=advantages)


def test_the_correction_of_the_example_is_icepop() -> None:
    spec = f"{EXAMPLE}:agreeing_tokens"
    mine, built_in = (compute_correction(name, correction_batch(), correction_options(name)) for name in (spec, "icepop"))
    assert torch.equal(mine.weights, built_in.weights)
    assert torch.equal(mine.keep, built_in.keep)
    assert 0 < int(mine.keep.sum()) < 64
    assert mine.stats.result() == built_in.stats.result()


def test_a_correction_may_return_weights_alone(tmp_path: Path) -> None:
    text = (
        "@agentrl.off_policy_correction\ndef mine(inputs, options):\n"
        "    return inputs.sequence_geometric_mean().where(inputs.sequence_product() < 1, 0.0)\n"
    )
    inputs = correction_batch()
    found = compute_correction(own(tmp_path, text, "mine"), inputs, NoOptions())
    log_rho = inputs.log_rho.reshape(8, 8)
    expected = log_rho.mean(1).exp().where(log_rho.sum(1) < 0, 0.0).repeat_interleave(8)
    torch.testing.assert_close(found.weights, expected)
    assert torch.equal(found.keep, expected != 0)
    assert found.stats.result()["off_policy/masked"] == pytest.approx(float((expected == 0).float().mean()))
    assert found.stats.result()["off_policy/bounded"] == 0.0


CORRECTION = "@agentrl.off_policy_correction\ndef correction(inputs, options):\n    {}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return inputs.ratio().sum()", "returned weights of shape .*one per action token"),
        ("return inputs.ratio().tolist()", "returned weights of type list"),
        ("return None", "returned weights of type NoneType"),
        ("return inputs.ratio() / 0", "returned weights that are not all finite"),
        ("return agentrl.TokenWeights(weights=inputs.ratio(), keep=inputs.same_version[:3])", "returned keep of shape"),
        ("return agentrl.TokenWeights(weights=inputs.ratio(), keep=inputs.old)", "returned keep of torch.float32"),
        ("return agentrl.TokenWeights(weights=inputs.ratio(), bounded=0.5)", "returned bounded of type float"),
        ("return inputs.nothing", r"raised AttributeError: .*own.py, line 5"),
    ],
)
def test_what_a_correction_returns_is_checked(tmp_path: Path, body: str, message: str) -> None:
    name = own(tmp_path, CORRECTION.format(body), "correction")
    with pytest.raises(PluginError, match=rf"--off-policy: correction of .*own.py {message}"):
        compute_correction(name, correction_batch(), NoOptions())


def test_log_probabilities_that_are_no_numbers_are_not_the_fault_of_a_correction() -> None:
    inputs = correction_batch()
    inputs.old[3] = math.nan
    assert compute_correction("tis", inputs, correction_options("tis")).weights.isnan().sum() == 1
