"""Combinations of algorithms that would do nothing, or something wrong, are refused with a way out."""

from __future__ import annotations

import re

import pytest

from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config

AGENT = ["--agent", "module:Name"]
GAE = ["--advantage-estimator", "gae"]
REUSE = ["--old-logprobs", "behaviour"]
INTERPOLATE = ["--old-logprobs", "interpolated"]
KL_LOSS = ["--init-kl-coef", "0.1", "--use-kl-loss"]


@pytest.mark.parametrize(
    ("args", "field", "remedy"),
    [
        ([*GAE, "--critic-learning-rate", "0"], "--critic-learning-rate", "reinforce"),
        (["--policy-loss", "reinforce", "--ppo-epochs", "2"], "--ppo-epochs", "--policy-loss ppo"),
        (["--policy-loss", "reinforce", "--mini-batches", "2"], "--mini-batches", "--policy-loss ppo"),
        (["--policy-loss", "reinforce", "--async", *REUSE], "--old-logprobs", "--policy-loss ppo"),
        (["--policy-loss", "cispo", "--dual-clip", "3"], "--dual-clip", "--policy-loss ppo"),
        (["--mask-truncated", "--advantage-estimator", "opo"], "--mask-truncated", "--no-truncated-in-baseline"),
        (["--advantage-estimator", "remax", "--group-quorum", "0.75"], "--group-quorum", "Leave out one"),
        (
            ["--advantage-estimator", "remax", "--max-concurrent-episodes", "4", "--n-samples-per-prompt", "4"],
            "--max-concurrent-episodes",
            "at least 5",
        ),
        (["--advantage-estimator", "remax", "--gamma", "0.9"], "--gamma", "use --advantage-estimator"),
        (["--advantage-estimator", "distillation"], "--advantage-estimator", "--teacher MODEL"),
        (["--teacher-coef", "0.5"], "--teacher-coef", "--teacher MODEL"),
        (["--teacher", "org/name", "--teacher-coef", "0"], "--teacher-coef", "help"),
        (["--teacher", "/no/such/model"], "--teacher", "is not a directory"),
        (["--teacher", "org/name", "--mini-batches", "2", *INTERPOLATE], "--old-logprobs", "Leave out one"),
        (["--pass-at-k", "2"], "--pass-at-k", "or use --advantage-estimator pass_at_k"),
        (["--advantage-estimator", "pass_at_k", "--pass-at-k", "9", "--n-samples-per-prompt", "8"], "--pass-at-k", "at most 8"),
        (["--advantage-estimator", "pass_at_k", "--pass-at-k", "1"], "--pass-at-k", "help"),
        (["--advantage-estimator", "pass_at_k", "--n-samples-per-prompt", "1"], "--n-samples-per-prompt", "reinforce"),
        (["--advantage-estimator", "turn_gae", "--critic-learning-rate", "0"], "--critic-learning-rate", "reinforce"),
        (["--advantage-estimator", "opo", "--gamma", "0.9"], "--gamma", "use --advantage-estimator"),
        (["--gae-lambda", "0.9"], "--gae-lambda", "use --advantage-estimator gae or turn_gae"),
        (["--gdpo-weights", "correct=1"], "--gdpo-weights", "use --advantage-estimator gdpo"),
        (["--advantage-estimator", "gdpo", "--gdpo-weights", "correct"], "--gdpo-weights", "correct=1"),
        (["--advantage-estimator", "gdpo", "--gdpo-weights", "a=1", "a=2"], "--gdpo-weights", "correct=1"),
        (["--advantage-estimator", "gdpo", "--stop-properly-penalty", "0"], "--stop-properly-penalty", "component"),
        (["--advantage-estimator", "gdpo", "--overlong-buffer", "4"], "--overlong-buffer", "component"),
        (["--policy-loss", "sapo", "--eps-clip-high", "0.3"], "--eps-clip-high", "--policy-loss ppo"),
        (["--policy-loss", "reinforce", "--eps-clip-low", "0.3"], "--eps-clip-low", "--policy-loss ppo"),
        (["--ipo-kl-coef", "0.001"], "--ipo-kl-coef", "--policy-loss ipo"),
        (["--policy-loss", "gmpo", "--sapo-tau-positive", "2"], "--sapo-tau-positive", "--policy-loss sapo"),
        (["--policy-loss", "dppo_tv", "--sapo-tau-negative", "2"], "--sapo-tau-negative", "--policy-loss sapo"),
        (["--policy-loss", "dppo_kl", "--dual-clip", "3"], "--dual-clip", "--policy-loss ppo"),
        (["--cov-share", "0.1"], "--cov-share", "clip_cov or kl_cov"),
        (["--policy-loss", "kl_cov", "--clip-cov-range", "1", "4"], "--clip-cov-range", "clip_cov"),
        (["--policy-loss", "clip_cov", "--clip-cov-range", "4", "1"], "--clip-cov-range", "smaller bound first"),
        (["--policy-loss", "clip_cov", "--kl-cov-coef", "0.1"], "--kl-cov-coef", "kl_cov"),
        (["--mini-batches", "2", *INTERPOLATE, "--policy-loss", "kl_cov"], "--old-logprobs", "kl_cov"),
        (["--mini-batches", "2", *INTERPOLATE, "--top-entropy-share", "0.2"], "--old-logprobs", "entropy"),
        (["--top-entropy-share", "0"], "--top-entropy-share", "help"),
        (KL_LOSS, "--kl-estimator", "k2"),
        (["--init-kl-coef", "0.1", "--kl-bias-correction"], "--kl-bias-correction", "--use-kl-loss"),
        (["--kl-bias-correction", "--use-kl-loss"], "--use-kl-loss", "--init-kl-coef"),
        (["--top-p", "0.9"], "--top-p", "--off-policy none"),
        (["--top-k", "5", "--off-policy", "none", *REUSE], "--top-k", "without --old-logprobs behaviour"),
        ([*REUSE, "--off-policy", "icepop"], "--off-policy", "Leave out"),
        ([*REUSE, "--off-policy", "decoupled"], "--off-policy", "Leave out"),
        ([*REUSE, "--off-policy-level", "geo"], "--off-policy-level", "Leave out"),
        ([*REUSE, "--opsm-delta", "0.1"], "--opsm-delta", "Leave out"),
        (INTERPOLATE, "--old-logprobs", "--mini-batches"),
        ([*INTERPOLATE, "--ppo-epochs", "2", "--init-kl-coef", "0.1"], "--old-logprobs", "--use-kl-loss"),
        ([*INTERPOLATE, "--ppo-epochs", "2", "--m2po-tau", "0.1"], "--old-logprobs", "--off-policy tis"),
        ([*INTERPOLATE, "--ppo-epochs", "2", "--aux-loss-coef", "0.1"], "--old-logprobs", "Leave it out"),
        ([*INTERPOLATE, "--ppo-epochs", "2", "--top-entropy-share", "0.2"], "--old-logprobs", "Leave it out"),
        ([*INTERPOLATE, "--ppo-epochs", "2", "--policy-loss", "kl_cov"], "--old-logprobs", "Leave it out"),
        (["--max-new-tokens", "64", "--overlong-buffer", "65"], "--overlong-buffer", "at most 64"),
        (["--no-truncated-in-baseline"], "--truncated-in-baseline", "--mask-truncated"),
        (["--mask-truncated", "--no-truncated-in-baseline", *GAE], "--truncated-in-baseline", "Leave it out"),
        (["--mask-truncated", "--no-truncated-in-baseline", "--stop-properly-penalty", "0"], "--truncated-in-baseline", "Leave out one"),
        (["--entropy-target", "0"], "--entropy-target", "help"),
        (["--task-sampling", "failures:level"], "--task-sampling", "curriculum:KEY"),
        (["--task-sampling", "curriculum:"], "--task-sampling", "curriculum:KEY"),
        (["--task-sampling", "failures", "--no-shuffle"], "--task-sampling", "Leave out one"),
        (["--overlong-penalty", "2"], "--overlong-penalty", "--overlong-buffer"),
        (["--score-range", "0.1", "0.9"], "--score-range", "--flat-groups"),
        (["--flat-groups", "drop", *GAE], "--flat-groups", "--score-range"),
        (["--flat-groups", "resample", "--teacher", "org/name"], "--flat-groups", "--score-range"),
        (["--oversample", "-1"], "--oversample", "help"),
        (["--n-samples-per-prompt", "1", "--advantage-estimator", "rloo"], "--n-samples-per-prompt", "reinforce"),
    ],
)
def test_each_rule_names_flag_value_and_remedy(args: list[str], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*AGENT, *args])
    assert caught.value.field == field
    assert caught.value.value is not None
    assert re.search(remedy, str(caught.value))


@pytest.mark.parametrize(
    "args",
    [
        [*GAE, "--n-samples-per-prompt", "1"],
        ["--policy-loss", "reinforce", "--async"],
        ["--async", *REUSE],
        ["--dual-clip", "3"],
        ["--task-sampling", "curriculum:level", "--async"],
        ["--task-sampling", "learnability"],
        ["--entropy-target", "0.2", "--entropy-coef", "0.001"],
        ["--mask-truncated", "--stop-properly-penalty", "0"],
        ["--mask-truncated", "--no-truncated-in-baseline", "--group-filter", "examples/own_algorithm.py:mixed_results"],
        [*INTERPOLATE, "--async", "--mini-batches", "2", *KL_LOSS, "--kl-estimator", "k2"],
        ["--advantage-estimator", "distillation", "--teacher", "org/name", "--n-samples-per-prompt", "1"],
        ["--teacher", "org/name", "--teacher-coef", "0.1"],
        ["--advantage-estimator", "pass_at_k", "--pass-at-k", "4", "--n-samples-per-prompt", "8"],
        ["--advantage-estimator", "gdpo", "--gdpo-weights", "correct=1", "format=0.5"],
        ["--advantage-estimator", "turn_norm", "--gamma", "0.9"],
        ["--advantage-estimator", "remax", "--n-samples-per-prompt", "1"],
        ["--policy-loss", "ipo", "--eps-clip-low", "0.1", "--ipo-kl-coef", "0.001", "--top-entropy-share", "0.2"],
        ["--policy-loss", "clip_cov", "--cov-share", "0.01", "--clip-cov-range", "0.5", "9"],
        [*KL_LOSS, "--kl-estimator", "k3"],
        [*KL_LOSS, "--kl-bias-correction"],
        ["--top-p", "0.9", "--off-policy", "none"],
        ["--max-new-tokens", "64", "--overlong-buffer", "64", "--overlong-penalty", "0.5", "--stop-properly-penalty", "-1"],
        ["--flat-groups", "resample", "--score-range", "0.1", "0.9", "--oversample", "0.5"],
        ["--flat-groups", "drop", "--score-range", "0", "1", *GAE],
    ],
)
def test_what_makes_sense_is_accepted(args: list[str]) -> None:
    load_config([*AGENT, *args])


def test_an_unknown_correction_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--off-policy = 'tsi': is not known. Did you mean tis\? Choose one of tis.*file.py:name"):
        load_config([*AGENT, "--off-policy", "tsi"])


@pytest.mark.parametrize("flag", ["--kl-estimator", "--loss-aggregation"])
def test_an_unknown_name_is_answered_with_the_known_ones(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} = 'no-such-thing': must be '.*', '.*' or '") as caught:
        load_config([*AGENT, flag, "no-such-thing"])
    assert caught.value.remedy
