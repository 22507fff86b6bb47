"""Demonstrations beside episodes: the gradient is that of both losses, with denominators of their own, however rows are laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.core.errors import LearnerError
from agentrl.core.types import Group
from agentrl.learner.demonstration_files import Demonstrations, write_demonstrations
from agentrl.learner.engine import TrainEngine, join
from agentrl.learner.state import LearnerState, load_state
from tests.learner_support import VOCABULARY, largest_difference, make_groups, make_settings

GROUPS = make_groups(5, 3, seed=1)
COEF = 0.7
ORDER = [[0, 3, 5], [1, 2, 4], [6, 0, 2]]
TINY = {"learner_backend": "torch", "zero_stage": 0}
LOOSE = {"old_logprobs": "behaviour"}


def made(number: int) -> list[tuple[list[int], list[int]]]:
    """Rows of several lengths, of each of which some places in the middle and at the end are trained."""
    rng = np.random.default_rng(7)
    rows = []
    for each in range(number):
        length = 4 + 3 * each
        rows.append((rng.integers(2, VOCABULARY, length).tolist(), [1, *range(length // 2, length - 1)]))
    return rows


ROWS = made(7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_demonstrations(tmp_path / "demonstrations", ROWS, ORDER)
    return tmp_path / "demonstrations"


def started(model: str, folder: Path | None, coef: float = COEF, **rest: Any) -> LearnerState:
    algo = {"sft_coef": coef, **rest.pop("algo", {})}
    settings = make_settings(model, learner=TINY | rest.pop("learner", {}), algo=algo, **rest)
    return load_state(replace(settings, demonstrations=folder), join("torch", 0, 1, device="cpu"))


def one_step(state: LearnerState, step: int = 0, groups: tuple[Group, ...] = GROUPS) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """Metrics of a step, and the gradient of each update."""
    found: list[dict[str, Tensor]] = []
    engine, update = state.models.policy, TrainEngine.update

    def collect(rate: float) -> float | None:
        found.append({name: part.grad.clone() for name, part in engine.module.named_parameters() if part.grad is not None})
        return update(engine, rate)

    engine.update = collect  # type: ignore[method-assign]
    metrics = state.train(step, groups)
    state.close()
    return metrics, found


def imitation(model_dir: str, numbers: list[int]) -> tuple[float, int, dict[str, Tensor]]:
    """Mean of ``-log p`` of the trained tokens of rows, their number, and the gradient: rows alone through a plain model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    losses = []
    for number in numbers:
        tokens, reads = ROWS[number]
        scores = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [-scores[place, tokens[place + 1]] for place in reads]
    loss = torch.stack(losses).mean()
    loss.backward()
    gradient = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss), len(losses), gradient


def weighed(first: dict[str, Tensor], second: dict[str, Tensor], coef: float = COEF) -> dict[str, Tensor]:
    return {name: first[name] + coef * second[name] for name in first}


@pytest.mark.parametrize("budget", [1, 40, 8192])
@pytest.mark.parametrize("step", [0, 2])
def test_the_gradient_is_that_of_both_losses(tiny_model: str, folder: Path, budget: int, step: int) -> None:
    learner = {"micro_batch_tokens": budget}
    alone_metrics, (alone,) = one_step(started(tiny_model, None, learner=learner), step)
    metrics, (both,) = one_step(started(tiny_model, folder, learner=learner), step)
    loss, tokens, expected = imitation(tiny_model, ORDER[step])
    assert largest_difference(both, weighed(alone, expected)) < 1e-5
    assert metrics["sft/loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["sft/tokens"] == tokens
    assert metrics["loss/sft"] == pytest.approx(COEF * loss, abs=1e-5)
    assert metrics["loss/policy"] == pytest.approx(alone_metrics["loss/policy"], abs=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["loss/policy"] + COEF * loss, abs=1e-5)


def test_a_weight_of_0_measures_and_trains_the_same_weights(tiny_model: str, folder: Path) -> None:
    plain, measured = started(tiny_model, None), started(tiny_model, folder, 0.0)
    for step in range(2):
        plain.train(step, GROUPS)
        metrics = measured.train(step, GROUPS)
        assert "loss/sft" not in metrics
        assert metrics["sft/loss"] > 1
    assert plain.digests() == measured.digests()
    assert metrics["loss"] == metrics["loss/policy"]


def test_updates_share_the_demonstrations_of_a_step(tiny_model: str, folder: Path) -> None:
    algo = {"mini_batches": 2, "ppo_epochs": 2, **LOOSE}
    metrics, found = one_step(started(tiny_model, folder, algo=algo, learner={"learning_rate": 0.0}))
    _, alone = one_step(started(tiny_model, None, algo=algo, learner={"learning_rate": 0.0}))
    # The longest row alone, and both others.
    parts = [imitation(tiny_model, numbers) for numbers in ([5], [0, 3])]
    assert len(found) == 4
    for place, (both, plain) in enumerate(zip(found, alone, strict=True)):
        assert largest_difference(both, weighed(plain, parts[place % 2][2])) < 1e-5
    assert metrics["loss/sft"] == pytest.approx(COEF * (parts[0][0] + parts[1][0]) / 2, abs=1e-5)
    assert metrics["sft/tokens"] == 2 * sum(tokens for _, tokens, _ in parts)
    assert metrics["loss"] == pytest.approx(metrics["loss/policy"] + metrics["loss/sft"], abs=1e-5)


def test_a_batch_of_fewer_updates_imitates_all_of_them(tiny_model: str, folder: Path) -> None:
    algo, one = {"mini_batches": 2, **LOOSE}, GROUPS[:1]
    metrics, (both,) = one_step(started(tiny_model, folder, algo=algo), groups=one)
    _, (alone,) = one_step(started(tiny_model, None, algo=algo), groups=one)
    loss, tokens, expected = imitation(tiny_model, ORDER[0])
    assert largest_difference(both, weighed(alone, expected)) < 1e-5
    assert (metrics["sft/tokens"], metrics["sft/loss"]) == (tokens, pytest.approx(loss, abs=1e-5))
    assert metrics["loss/sft"] == pytest.approx(COEF * loss, abs=1e-5)


def test_an_adapter_imitates_too(tiny_model: str, folder: Path) -> None:
    _, (alone,) = one_step(started(tiny_model, None, lora={"lora_rank": 2}))
    metrics, (both,) = one_step(started(tiny_model, folder, lora={"lora_rank": 2}))
    assert largest_difference(both, alone) > 1e-3
    assert metrics["sft/loss"] == pytest.approx(imitation(tiny_model, ORDER[0])[0], abs=1e-5)


def test_nothing_is_imitated_while_the_critic_warms_up(tiny_model: str, folder: Path) -> None:
    state = started(tiny_model, folder, algo={"advantage_estimator": "gae"}, learner={"critic_warmup_steps": 1})
    assert "sft/loss" not in state.train(0, GROUPS)
    assert "sft/loss" in state.train(1, GROUPS)


def test_rows_are_those_of_the_step_whatever_came_before(folder: Path) -> None:
    table = Demonstrations(folder)
    for step in (2, 0, 1):
        assert [(tokens.tolist(), reads.tolist()) for tokens, reads in table.of_step(step)] == [ROWS[number] for number in ORDER[step]]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"cannot be read from .*nowhere.*--run-dir that all of them see"):
        Demonstrations(tmp_path / "nowhere")


def test_other_demonstrations_take_the_place_of_those_that_are_there(folder: Path) -> None:
    write_demonstrations(folder, ROWS[:1], [[0]])
    assert len(Demonstrations(folder).of_step(0)) == 1
    with pytest.raises(IndexError):
        Demonstrations(folder).of_step(1)
