"""A learner that is saved and loaded by another process goes on exactly as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from agentrl.core.errors import CheckpointError
from agentrl.learner.deepspeed.saved import read_saved
from agentrl.learner.learner import LearnerRank
from tests.learner_support import CollectingSender, make_groups, make_settings

EVERYTHING: dict[str, Any] = {
    "learner": {"ema_decay": 0.5, "critic_warmup_steps": 1, "weight_decay": 0.1, "lr_schedule": "cosine", "max_grad_norm": 0.5},
    "algo": {"advantage_estimator": "gae", "init_kl_coef": 0.1, "kl_target": 0.01, "ref_reset_every": 2}
    | {"entropy_coef": 0.01, "entropy_target": 2.2},
}


def changes_of(stage: int, dtype: str = "float32") -> dict[str, Any]:
    return {**EVERYTHING, "learner": {**EVERYTHING["learner"], "zero_stage": stage, "learner_dtype": dtype}}


def started(model: str, changes: dict[str, Any]) -> LearnerRank:
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    return learner


def steps(learner: LearnerRank, first: int, last: int) -> list[dict[str, float]]:
    found = [learner.train(step, *make_groups(seed=step, version=step)).metrics for step in range(first, last)]
    return [{name: value for name, value in metrics.items() if not name.startswith("time/")} for metrics in found]


def outcome(learner: LearnerRank) -> dict[str, Any]:
    """Weights of every model, and the next draw from every generator."""
    state = learner._started
    weights = {f"policy {name}": tensor.clone() for name, tensor in state.named_weights()}
    for kind, engine in (("critic", state.models.critic), ("reference", state.models.reference)):
        if engine is not None:
            from agentrl.learner.deepspeed.parameters import PARAMETERS

            module = engine.module if hasattr(engine, "module") else engine
            weights |= {f"{kind} {name}": tensor.clone() for name, tensor in PARAMETERS.named(module)}
    if state.average is not None:
        weights |= {f"average {name}": tensor.clone() for name, tensor in state.average.weights()}
    draws = (torch.rand(2).tolist(), random.random(), float(np.random.rand()))
    return {"weights": weights, "draws": draws, "kl": state.kl.coefficient, "entropy": (state.entropy.coefficient, state.entropy.above)}


CASES = {f"{stage}-{dtype}": changes_of(stage, dtype) for stage, dtype in (
    (0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (0, "bfloat16"), (2, "bfloat16")
)}  # fmt: skip


def continue_all(model: str, folder: Path) -> None:
    for name, changes in CASES.items():
        learner = started(model, changes)
        assert learner.load_checkpoint(str(folder / name)) == 3
        torch.save((steps(learner, 3, 6), outcome(learner)), folder / f"{name}.pt")
        learner.close()


Outcome = tuple[list[dict[str, float]], dict[str, Any]]


@pytest.fixture(scope="module")
def continued(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Outcome]]:
    """Case -> how it goes on without and with an interruption; one other process continues all of them."""
    folder, without = tmp_path_factory.mktemp("saved"), {}
    for name, changes in CASES.items():
        learner = started(tiny_model, changes)
        steps(learner, 0, 3)
        random.random()
        np.random.rand()
        (folder / name).mkdir()
        learner.save_checkpoint(str(folder / name), 3)
        without[name] = steps(learner, 3, 6), outcome(learner)
        learner.close()
    process = multiprocessing.get_context("spawn").Process(target=continue_all, args=(tiny_model, folder))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return {name: (without[name], torch.load(folder / f"{name}.pt")) for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_next_steps_of_another_process_are_bit_identical(continued: dict[str, tuple[Outcome, Outcome]], case: str) -> None:
    (metrics, expected), (same_metrics, found) = continued[case]
    assert same_metrics == metrics
    assert found["draws"] == expected["draws"]
    assert found["kl"] == expected["kl"] != EVERYTHING["algo"]["init_kl_coef"]
    assert found["entropy"] == expected["entropy"] != (EVERYTHING["algo"]["entropy_coef"], False)
    assert {name.split()[0] for name in found["weights"]} == {"policy", "critic", "reference", "average"}
    assert [name for name, tensor in expected["weights"].items() if not torch.equal(tensor, found["weights"][name])] == []


class Intruder:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved(model: str, path: Path, **changes: Any) -> Path:
    path.mkdir()
    learner = started(model, changes)
    learner.save_checkpoint(str(path), 0)
    learner.close()
    return path


def test_reading_a_checkpoint_runs_no_code(tiny_model: str, tmp_path: Path) -> None:
    path = saved(tiny_model, tmp_path / "saved")
    for file in ("policy/state/mp_rank_00_model_states.pt", "rank-0.pt"):
        assert (path / file).exists()
        torch.save({"module": Intruder(tmp_path / "intruded")}, path / file)
        learner = started(tiny_model, {})
        with pytest.raises(CheckpointError, match="cannot be read"):
            learner.load_checkpoint(str(path))
        learner.close()
        assert not (tmp_path / "intruded").exists()


def test_a_full_disk_is_a_checkpoint_error_and_training_can_go_on(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            learner.save_checkpoint(str(tmp_path), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps(learner, 0, 1)
    learner.close()


def test_a_member_of_an_enum_is_read_and_no_other_code(tmp_path: Path) -> None:
    class Named:
        """Is pickled as a member of an enum was until Python 3.11.4."""

        def __init__(self, kind: Any, name: str) -> None:
            self.asked = (kind, name)

        def __reduce__(self) -> Any:
            return getattr, self.asked

    torch.save({"stage": Named(ZeroStageEnum, "gradients")}, tmp_path / "good.pt")
    assert read_saved(tmp_path / "good.pt") == {"stage": ZeroStageEnum.gradients}
    torch.save({"stage": Named(LossScaler, "backward")}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="getattr"):
        read_saved(tmp_path / "bad.pt")
