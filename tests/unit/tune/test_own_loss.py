"""``--loss file.py:name``: a user's own objective is trained, checked before anything starts, and kept with the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError, PluginError
from agentrl.resolve.tune import TunePlan, load
from agentrl.tune.directory import TuneResult
from agentrl.tune.run import tune

EXAMPLES = Path(__file__).parents[3] / "examples"
CHATS, PAIRS = EXAMPLES / "tune" / "chats.jsonl", EXAMPLES / "tune" / "pairs.jsonl"
OWN = EXAMPLES / "own_loss.py"
FOCAL, HARD = f"{OWN}:focal", f"{OWN}:hard_pairs"
SIZES: dict[str, Any] = {"num_steps": 2, "batch_size": 8, "eval_size": 8, "record_rows": 0, "tensorboard": False, "token_cache": "none"}

OTHERS = """
from dataclasses import dataclass

import agentrl


@agentrl.objective(unit="row")
def shorter(scores, options):
    return scores.sums() * 0.01


@agentrl.objective(unit="place")
def summed(scores, options):
    return -scores.sums()


@agentrl.objective(unit="place")
def cut(scores, options):
    return -scores.outputs.detach()


@agentrl.objective(unit="place")
def named(scores, options):
    return agentrl.RowLosses(losses=-scores.outputs, metrics={"mean": 1.0})


@agentrl.objective(unit="place")
def broken(scores, options):
    return scores.no_such_thing


@agentrl.objective(unit="place", prepare=lambda step, options: {"odd": step.lengths[:1]})
def unprepared(scores, options):
    return -scores.outputs


@dataclass(frozen=True, kw_only=True)
class Clash:
    learning_rate: float = 0.1


@agentrl.objective(unit="place", options=Clash)
def clashing(scores, options):
    return -scores.outputs


def plain(scores, options):
    return -scores.outputs
"""


@pytest.fixture
def others(tmp_path: Path) -> Path:
    path = tmp_path / "others.py"
    path.write_text(OTHERS)
    return path


def run(folder: Path, method: str = "sft", data: Path = CHATS, **settings: Any) -> TuneResult:
    return tune(method, data=str(data), run_dir=folder, **(SIZES | settings))


def weights(result: TuneResult) -> bytes:
    return (result.model / "model.safetensors").read_bytes()


def rows(result: TuneResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_example_without_focus_trains_as_sft_does(tmp_path: Path) -> None:
    usual = run(tmp_path / "usual")
    own, focused = (run(tmp_path / f"focus-{focus}", loss=FOCAL, focus=focus) for focus in (0.0, 3.0))
    assert weights(own) == weights(usual)
    assert weights(focused) != weights(usual)
    for before, now, less in zip(rows(usual), rows(own), rows(focused), strict=True):
        shared = {name: value for name, value in before.items() if not name.startswith(("time", "memory/", "eval/seconds"))}
        assert shared.items() <= now.items()
        assert now.get("own/weight", 1.0) == 1.0
        assert now["eval/loss"] > less["eval/loss"] if "eval/loss" in now else "own/weight" in less
    config = json.loads((focused.run_dir / "config.json").read_text())
    assert config["method"] == {"loss": FOCAL, "train_on": "answers", "focus": 3.0}
    assert (focused.run_dir / "plugins" / "own_loss.py").read_bytes() == OWN.read_bytes()


def test_the_example_for_pairs_trains(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "dpo", PAIRS, loss=HARD, beta=0.5)
    first = rows(result)[0]
    # Before the first step the policy is its reference: a margin of 0 in each pair, whose loss is weighed by a half.
    assert first["eval/loss"] == pytest.approx(0.5 * 0.6931, abs=1e-3)
    assert result.metrics["eval/loss"] < first["eval/loss"]


def test_answers_that_are_labelled_need_no_reference(tmp_path: Path, others: Path) -> None:
    result = run(tmp_path / "run", "kto", PAIRS, loss=f"{others}:shorter")
    assert result.metrics["loss"] < 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("summed", r"--loss: summed of .*others.py returned losses of shape \(\d+,\). Return a tensor of \d+ numbers, one per place"),
        ("cut", "returned losses without a gradient. Compute them from scores.outputs"),
        ("named", "returned a metric that is no tensor of numbers"),
        ("broken", r"raised AttributeError: .*no_such_thing.*others.py, line \d+"),
        ("unprepared", "returned something else than tensors of one number per row"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, others: Path, name: str, problem: str) -> None:
    with pytest.raises(PluginError, match=problem):
        run(tmp_path / "run", loss=f"{others}:{name}", eval_size=0)


def planned(method: str, *words: str) -> TunePlan:
    return load(METHODS[method], ["--data", str(PAIRS if method != "sft" else CHATS), *words])


@pytest.mark.parametrize(
    ("method", "words", "problem"),
    [
        ("sft", ("--loss", "dff"), "--loss = 'dff': must be 'nll' or 'dft'"),
        ("kto", ("--loss", "sft"), "--loss = 'sft': is not known. Write file.py:name"),
        ("sft", ("--loss", f"{OWN}:focl"), "there is no 'focl' in .* Did you mean focal?"),
        ("sft", ("--loss", HARD), "is a loss of pairs, and the rows of agentrl sft are none"),
        ("reward-model", ("--loss", HARD), 'reads tokens, and agentrl reward-model gives it head. State unit="pair" and reads="head"'),
        ("distill", ("--loss", FOCAL, "--teacher", "x"), "reads tokens, and agentrl distill gives it divergence"),
        ("dpo", ("--loss", HARD, "--label-smoothing", "0.1"), "--label-smoothing = 0.1: has no effect on --loss"),
        ("sft", ("--loss", "OTHERS:clashing"), "Clash has an option learning_rate, and there is a setting of that name"),
        ("sft", ("--loss", "OTHERS:plain"), "plain was not made by @agentrl.objective"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_at_once(others: Path, method: str, words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        planned(method, *(word.replace("OTHERS", str(others)) for word in words))


def test_a_file_of_settings_may_have_the_usual_options_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(planned("dpo").to_json())
    assert planned("dpo", "--config", str(file), "--loss", HARD).settings.method.loss == HARD
    file.write_text(planned("dpo", "--loss", "cdpo", "--label-smoothing", "0.2").to_json())
    with pytest.raises(ConfigError, match="has no effect on --loss"):
        planned("dpo", "--config", str(file), "--loss", HARD)
    file.write_text(planned("dpo", "--loss", HARD, "--beta", "0.7").to_json())
    assert vars(planned("dpo", "--config", str(file)).settings.method)["beta"] == 0.7


def test_a_run_does_not_go_on_with_another_file(tmp_path: Path, others: Path) -> None:
    settings = {"loss": f"{others}:shorter", "save_every": 1, "lr_schedule": "constant", "eval_size": 0}
    run(tmp_path / "run", **settings, num_steps=1)
    others.write_text(OTHERS.replace("0.01", "0.02"))
    with pytest.raises(ConfigError, match="the file was changed since the run began"):
        tune("sft", resume=str(tmp_path / "run"), num_steps=2)
    others.write_text(OTHERS)
    assert tune("sft", resume=str(tmp_path / "run"), num_steps=2).steps == 2
    others.unlink()
    with pytest.raises(ConfigError, match=r"there is no such file any more. Restore it: cp"):
        tune("sft", resume=str(tmp_path / "run"), num_steps=3)
