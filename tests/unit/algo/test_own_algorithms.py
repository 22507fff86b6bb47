"""An estimator, a loss, a correction and a filter of a user's own file: the same as built-in ones, and refused with the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions, DiscountedOptions
from agentrl.algo.compute import compute_advantages, compute_policy_loss
from agentrl.algo.corrections import CORRECTIONS, correction_facts
from agentrl.algo.estimators import ESTIMATORS, estimator_facts, find_estimator
from agentrl.algo.estimators.gae import GaeOptions
from agentrl.algo.estimators.gdpo import GdpoOptions
from agentrl.algo.estimators.gigpo import GigpoOptions
from agentrl.algo.estimators.pass_at_k import PassAtKOptions
from agentrl.algo.facts import CorrectionFacts, EstimatorFacts, LossFacts, found_in
from agentrl.algo.filters import find_filter, reject_flat
from agentrl.algo.losses import POLICY_LOSSES, find_loss, loss_facts
from agentrl.algo.losses.covariance import ClipCovOptions, KlCovOptions, high_covariance, random_in_covariance_range
from agentrl.algo.losses.dppo import DppoKlOptions, DppoTvOptions
from agentrl.algo.losses.gmpo import GmpoOptions
from agentrl.algo.losses.ipo import IpoOptions
from agentrl.algo.losses.ppo import PpoOptions
from agentrl.algo.losses.sapo import SapoOptions
from agentrl.algo.options import NoOptions
from agentrl.algo.plan import AlgoConfig, flatness
from agentrl.algo.token_losses import LossInputs, LossOptions
from agentrl.core.errors import ConfigError, PluginError
from agentrl.core.summaries import GroupSummary
from agentrl.resolve.commands import load_config
from tests.unit.algo.chosen import estimator_options, loss_options
from tests.unit.algo.ragged import ragged
from tests.unit.flow.fakes import member

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm.py"
HEAD = "import agentrl\n\n"


def own(tmp_path: Path, text: str, name: str) -> str:
    path = tmp_path / "own.py"
    path.write_text(HEAD + text)
    return f"{path}:{name}"


def batch() -> AdvantageInputs:
    shape = ragged(3)
    rewards = torch.rand(len(shape.lengths), generator=shape.generator).round()
    return AdvantageInputs(
        token_rewards=shape.at_end(rewards), episode=shape.episode, group=shape.group, rewards=rewards, kl=0.1 * shape.randn(shape.size)
    )


def loss_batch(seed: int = 0) -> LossInputs:
    draw = torch.Generator().manual_seed(seed)
    old, step, advantages = (torch.randn(64, generator=draw) for _ in range(3))
    new = (old + 0.3 * step).requires_grad_()
    return LossInputs(new=new, old=old, advantages=advantages, sequence=torch.arange(64) // 8)


def group(scores: list[float | None], rewards: list[float]) -> GroupSummary:
    members = tuple(member(reward, score=score) for score, reward in zip(scores, rewards, strict=True))
    return GroupSummary(group_id=7, members=members, versions=(0, 0), seconds=1.0)


def test_the_estimator_of_the_example_is_group_norm() -> None:
    mine = compute_advantages(f"{EXAMPLE}:group_advantages", batch(), estimator_options(f"{EXAMPLE}:group_advantages")).advantages
    assert torch.equal(mine, compute_advantages("group_norm", batch(), estimator_options("group_norm")).advantages)


def test_the_loss_of_the_example_is_ppo() -> None:
    def run(name: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        inputs = loss_batch()
        result = compute_policy_loss(name, inputs, loss_options(name, eps_clip_high=0.28))
        result.per_token.sum().backward()
        assert inputs.new.grad is not None
        return result.per_token, inputs.new.grad, result.stats.result()

    mine, built_in = run(f"{EXAMPLE}:clipped_loss"), run("ppo")
    assert torch.equal(mine[0], built_in[0])
    assert torch.equal(mine[1], built_in[1])
    assert {name: value for name, value in mine[2].items() if name != "policy/distance"} == built_in[2]
    assert 0.1 < mine[2]["policy/distance"] < 0.5


@pytest.mark.parametrize(
    ("scores", "rewards"),
    [([0.0, 0.0], [0.0, 0.0]), ([1.0, 1.0], [1.0, 2.0]), ([0.0, 1.0], [0.0, 1.0]), ([0.5, 0.5], [1.0, 1.0]), ([None, None], [0.0, 1.0])],
)
def test_the_filter_of_the_example_is_that_of_flat_groups(scores: list[float | None], rewards: list[float]) -> None:
    assert find_filter(f"{EXAMPLE}:mixed_results")(group(scores, rewards)) == reject_flat(group(scores, rewards), flatness(AlgoConfig()))


def test_the_example_and_its_facts_need_no_torch() -> None:
    code = (
        f"import sys; import agentrl.algo.estimators as a; a.estimator_facts('{EXAMPLE}:group_advantages'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "False"


def test_the_facts_of_built_in_algorithms() -> None:
    stated = {name: estimator_facts(name) for name in ESTIMATORS}
    assert {name for name, facts in stated.items() if facts.needs_critic} == {"gae", "turn_gae"}
    assert {name for name, facts in stated.items() if not facts.compares_group} == {"gae", "turn_gae", "reinforce", "distillation", "remax"}
    assert {name for name, facts in stated.items() if facts.needs_teacher} == {"distillation"}
    assert {name for name, facts in stated.items() if facts.greedy_baseline} == {"remax"}
    assert {name for name, facts in stated.items() if facts.token_baseline} == {"opo", "turn_norm", "gigpo"}
    assert {name for name, facts in stated.items() if facts.whitens} == {"gae", "turn_gae", "reinforce", "reinforce_baseline", "gdpo"}
    discounted = {"gae", "turn_gae", "turn_norm", "gigpo", "reinforce", "reinforce_baseline"}
    assert {name for name, facts in stated.items() if facts.discounts} == discounted
    assert {name: facts.options for name, facts in stated.items() if facts.options is not AdvantageOptions} == {
        **dict.fromkeys(("gae", "turn_gae"), GaeOptions),
        **dict.fromkeys(("reinforce", "reinforce_baseline", "turn_norm"), DiscountedOptions),
        "pass_at_k": PassAtKOptions,
        "gigpo": GigpoOptions,
        "gdpo": GdpoOptions,
    }
    assert {name for name, facts in stated.items() if facts.length_neutral} == {"dr_grpo"}
    assert {name for name, facts in stated.items() if not facts.charges_kl} == {"distillation"}
    assert {name: loss_facts(name) for name in POLICY_LOSSES} == {
        "ppo": LossFacts(options=PpoOptions),
        "gspo": LossFacts(),
        "cispo": LossFacts(),
        "reinforce": LossFacts(single_update=True, options=NoOptions),
        "dppo_tv": LossFacts(options=DppoTvOptions),
        "dppo_kl": LossFacts(options=DppoKlOptions),
        "ipo": LossFacts(options=IpoOptions),
        "sapo": LossFacts(options=SapoOptions),
        "gmpo": LossFacts(options=GmpoOptions),
        "clip_cov": LossFacts(selects=random_in_covariance_range, options=ClipCovOptions),
        "kl_cov": LossFacts(several_updates=True, selects=high_covariance, options=KlCovOptions),
    }
    assert {name: correction_facts(name).whole_batch for name in CORRECTIONS} == dict.fromkeys(CORRECTIONS, False)


def test_a_decorator_without_parentheses_states_the_defaults(tmp_path: Path) -> None:
    text = "@agentrl.advantage_estimator\ndef plain(inputs, options):\n    return inputs.over_tokens(inputs.rewards)\n"
    assert estimator_facts(own(tmp_path, text, "plain")) == EstimatorFacts()
    text = "@agentrl.off_policy_correction\ndef plain(inputs, options):\n    return inputs.ratio()\n"
    assert correction_facts(own(tmp_path, text, "plain")) == CorrectionFacts()


def test_advantages_are_whitened_where_that_is_a_fact(tmp_path: Path) -> None:
    text = "@agentrl.advantage_estimator(whitens=True)\ndef scaled(inputs, options):\n    return inputs.over_tokens(inputs.rewards)\n"
    advantages = compute_advantages(own(tmp_path, text, "scaled"), batch(), estimator_options(own(tmp_path, text, "scaled"))).advantages
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("estimator = 3\n", "estimator is an int, not a function", "Put @agentrl.advantage_estimator() above"),
        (
            "def estimator(inputs, options): ...\n",
            "was not made by @agentrl.advantage_estimator",
            "Put @agentrl.advantage_estimator() above",
        ),
        ("@agentrl.policy_loss\ndef estimator(inputs, options): ...\n", "was not made by @agentrl.advantage_estimator", "above a function"),
        ("@agentrl.advantage_estimator\nasync def estimator(inputs, options): ...\n", "is a coroutine function", "plain def"),
        ("@agentrl.advantage_estimator\ndef estimator(inputs): ...\n", "estimator(inputs) cannot be called with", "these arguments"),
    ],
)
def test_what_is_no_estimator_is_refused(tmp_path: Path, text: str, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_estimator(own(tmp_path, text, "estimator"))
    assert caught.value.field == "--advantage-estimator"
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_file_is_all_that_a_built_in_algorithm_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_losses"
    package.mkdir()
    (package / "__init__.py").write_text("")
    head = "from agentrl.algo.facts import policy_loss\n"
    (package / "plain.py").write_text(f"{head}@policy_loss\ndef the_plain(inputs, options): ...\n")
    (package / "also.py").write_text("from some_losses.plain import the_plain\ndef no_loss(inputs): ...\nalso = the_plain\n")
    (package / "ours.py").write_text(f"{head}@policy_loss\ndef ours(inputs, options): ...\nshort = ours\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(found_in("some_losses", [str(package)], "the-plain", hyphens=True)) == ["the-plain", "ours", "short"]


def test_a_misspelt_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--policy-loss = 'pppo': is not known. Did you mean ppo\? Choose one of ppo, cispo"):
        find_loss("pppo")


ESTIMATOR = "@agentrl.advantage_estimator\ndef estimator(inputs, options):\n    {}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return inputs.rewards", "returned advantages of shape .*one per action token"),
        ("return inputs.token_rewards.tolist()", "returned advantages of type list"),
        ("return inputs.token_rewards / 0", "returned advantages that are not all finite"),
        ("return inputs.nothing", r"raised AttributeError: .*own.py, line 5"),
    ],
)
def test_what_an_estimator_returns_is_checked(tmp_path: Path, body: str, message: str) -> None:
    name = own(tmp_path, ESTIMATOR.format(body), "estimator")
    with pytest.raises(PluginError, match=rf"--advantage-estimator: estimator of .*own.py {message}"):
        compute_advantages(name, batch(), estimator_options(name))


def test_an_estimator_with_a_critic_returns_its_targets(tmp_path: Path) -> None:
    text = "@agentrl.advantage_estimator(needs_critic=True)\ndef estimator(inputs, options):\n    return inputs.token_rewards\n"
    with pytest.raises(PluginError, match="returned returns of type NoneType"):
        compute_advantages(own(tmp_path, text, "estimator"), batch(), estimator_options(own(tmp_path, text, "estimator")))


LOSS = "@agentrl.policy_loss\ndef loss(inputs, options):\n    {}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (inputs.new * inputs.advantages).sum()", "returned per_token of shape"),
        ("return None", "returned per_token of type NoneType"),
        ("return -inputs.new.detach() * inputs.advantages", "returned a loss without a gradient"),
        ("return agentrl.TokenLosses(per_token=inputs.new, clipped=inputs.new[:3] > 0)", "returned clipped of shape"),
        ("return agentrl.TokenLosses(per_token=inputs.new, metrics={'kl': inputs.new})", "returned a metric 'kl', which every loss has"),
        ("return agentrl.TokenLosses(per_token=inputs.new, metrics={'mine': 1.0})", "returned a metric that is no tensor"),
        ("return inputs.new + inputs.old[:3]", r"raised RuntimeError: .*own.py, line 5"),
    ],
)
def test_what_a_loss_returns_is_checked(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(PluginError, match=rf"--policy-loss: loss of .*own.py {message}"):
        compute_policy_loss(own(tmp_path, LOSS.format(body), "loss"), loss_batch(), LossOptions())


@pytest.mark.parametrize(
    ("body", "message"), [("return True", "returned True for group 7"), ("return ''", "returned ''"), ("return group.x", "AttributeError")]
)
def test_what_a_filter_returns_is_checked(tmp_path: Path, body: str, message: str) -> None:
    judge = find_filter(own(tmp_path, f"@agentrl.group_filter\ndef judge(group):\n    {body}\n", "judge"))
    with pytest.raises(PluginError, match=rf"--group-filter: judge of .*own.py .*{message}"):
        judge(group([0.0, 1.0], [0.0, 1.0]))


FACTS = """
@agentrl.advantage_estimator(compares_group=True)
def compared(inputs, options): ...

@agentrl.advantage_estimator(needs_critic=True)
def critic(inputs, options): ...

@agentrl.policy_loss(single_update=True)
def once(inputs, options): ...

@agentrl.off_policy_correction
def weigh(inputs, options): ...

@agentrl.off_policy_correction(whole_batch=True)
def judge(inputs, options): ...

@agentrl.group_filter(compares_group=True)
def mixed(group): ...
"""


@pytest.mark.parametrize(
    ("flag", "name", "words", "field"),
    [
        ("--advantage-estimator", "compared", ["--n-samples-per-prompt", "1"], "--n-samples-per-prompt"),
        ("--advantage-estimator", "compared", ["--gamma", "0.9"], "--gamma"),
        ("--advantage-estimator", "compared", ["--init-kl-coef", "0.1"], "--init-kl-coef"),
        ("--advantage-estimator", "compared", ["--critic-warmup-steps", "1"], "--critic-warmup-steps"),
        ("--advantage-estimator", "critic", ["--critic-learning-rate", "0"], "--critic-learning-rate"),
        ("--policy-loss", "once", ["--ppo-epochs", "2"], "--ppo-epochs"),
        ("--policy-loss", "once", ["--dual-clip", "3"], "--dual-clip"),
        ("--off-policy", "weigh", ["--off-policy-level", "seq"], "--off-policy-level"),
        ("--off-policy", "weigh", ["--opsm-delta", "0.1"], "--opsm-delta"),
        ("--off-policy", "weigh", ["--old-logprobs", "behaviour"], "--off-policy"),
        ("--off-policy", "weigh", ["--top-p", "0.9"], "--top-p"),
        ("--off-policy", "judge", ["--old-logprobs", "interpolated", "--mini-batches", "2"], "--old-logprobs"),
        ("--off-policy", "compared", [], "--off-policy"),
        ("--group-filter", "mixed", ["--flat-groups", "resample"], "--group-filter"),
        ("--group-filter", "mixed", ["--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce"], "--group-filter"),
        ("--group-filter", "once", [], "--group-filter"),
    ],
)
def test_facts_are_held_against_the_other_flags(tmp_path: Path, flag: str, name: str, words: list[str], field: str) -> None:
    spec = own(tmp_path, FACTS, name)
    with pytest.raises(ConfigError) as caught:
        load_config(["--agent", "module:Name", flag, spec, *words])
    assert caught.value.field == field
    assert caught.value.remedy


def test_the_resolved_configuration_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(tmp_path, FACTS, "compared")
    monkeypatch.chdir(tmp_path)
    flags = ["--advantage-estimator", "own.py:compared", "--group-filter", "own.py:mixed", "--off-policy", "own.py:weigh"]
    config = load_config(["--agent", "module:Name", *flags])
    assert config.algo.advantage_estimator == f"{tmp_path}/own.py:compared"
    assert config.algo.off_policy == f"{tmp_path}/own.py:weigh"
    assert config.flow.group_filter == f"{tmp_path}/own.py:mixed"
