"""Options that a user's own loss and correction declare: flags of that run, settings in Python, saved, and kept on resumption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentrl
from agentrl.core.errors import ConfigError
from tests.e2e.runs import ROOT, SMALL, Run, succeeded, train

SOURCE = '''
from dataclasses import dataclass
from typing import Annotated

import agentrl
from annotated_types import Gt


@dataclass(frozen=True, kw_only=True)
class Weighing:
    my_tau: Annotated[float, Gt(0)] = 1.0
    """Weight of tokens whose advantage is positive."""


@agentrl.policy_loss(options=Weighing)
def mine(inputs, options):
    weight = (inputs.advantages > 0) * (options.my_tau - 1.0) + 1.0
    return -inputs.ratio() * inputs.advantages * weight


@dataclass(frozen=True, kw_only=True)
class Cut:
    my_bound: float = 2.0
    """Largest weight of a token."""


@agentrl.off_policy_correction(options=Cut)
def cut(inputs, options):
    return inputs.ratio().clamp(max=options.my_bound)
'''
FLAGS = (*SMALL, "--num-steps", "2", "--record", "none", "--no-tensorboard", "--save-every", "1", "--skip-checks", "env")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_flags_python_and_resumption_take_the_options(tmp_path: Path, file: Path) -> None:
    own = ("--policy-loss", f"{file}:mine", "--off-policy", f"{file}:cut", "--runtime", "local", "--engine", "transformers")
    run = succeeded(train(tmp_path / "flags", *FLAGS, *own, "--my-tau", "3", "--my-bound", "1.5"))
    options = json.loads((run.directory / "config.json").read_text())["algo"]["options"]
    assert (options["my_tau"], options["my_bound"], options["advantage_std_norm"]) == (3.0, 1.5, True)
    assert "eps_clip_low" not in options
    plain = succeeded(train(tmp_path / "plain", *FLAGS, *own))
    assert weights(plain) != weights(run)

    words = dict(zip([word[2:].replace("-", "_") for word in SMALL[::2]], SMALL[1::2], strict=True))
    sizes = {name: type_of(value) for name, value in words.items()}
    given = {
        **sizes,
        "num_steps": 2,
        "record": "none",
        "tensorboard": False,
        "runtime": "local",
        "engine": "transformers",
        "skip_checks": ("env",),
    }
    agent = str(given.pop("agent", ROOT / "envs" / "arithmetic.py"))
    python = agentrl.train(
        agent, **given, run_dir=tmp_path / "python", policy_loss=f"{file}:mine", off_policy=f"{file}:cut", my_tau=3.0, my_bound=1.5
    )
    assert (python.path / "model" / "model.safetensors").read_bytes() == weights(run)

    longer = train(run.directory, "--resume", str(run.directory), "--num-steps", "3")
    assert json.loads((succeeded(longer).directory / "config.json").read_text())["algo"]["options"]["my_tau"] == 3.0
    other = train(run.directory, "--resume", str(run.directory), "--num-steps", "4", "--my-tau", "2")
    assert (other.code, "--my-tau (was 3.0, now 2.0)" in other.output) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_steps_on_ray_are_those_of_one_process(tmp_path: Path, file: Path) -> None:
    own = ("--policy-loss", f"{file}:mine", "--off-policy", f"{file}:cut", "--my-tau", "3", "--my-bound", "1.5")
    local = succeeded(train(tmp_path / "local", *FLAGS, *own, "--runtime", "local"))
    ray = succeeded(train(tmp_path / "ray", *FLAGS, *own, "--runtime", "ray"))
    assert weights(ray) == weights(local)


def test_wrong_options_are_named(file: Path) -> None:
    from tests.given import train_settings

    own = {"policy_loss": f"{file}:mine"}
    with pytest.raises(ConfigError, match=r"--my-tau = -1.0: must be greater than 0"):
        train_settings("envs/calculator.py", {**own, "my_tau": -1.0})
    with pytest.raises(ConfigError, match=r"my_tao = 1.0: is not a setting. Did you mean `my_tau`"):
        train_settings("envs/calculator.py", {**own, "my_tao": 1.0})
    with pytest.raises(ConfigError, match=r"--eps-clip-low = 0.1: has no effect on --policy-loss .*mine.py:mine"):
        train_settings("envs/calculator.py", {**own, "eps_clip_low": 0.1})
    taken = file.with_name("taken.py")
    taken.write_text(SOURCE.replace("my_tau", "learning_rate"))
    with pytest.raises(ConfigError, match=r"has an option learning_rate, and there is a setting of that name"):
        train_settings("envs/calculator.py", {"policy_loss": f"{taken}:mine"})


def type_of(word: str) -> object:
    """A word of the command line as Python code would give it."""
    return int(word) if word.isdecimal() else word
