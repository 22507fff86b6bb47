"""A checkpoint goes on under another ZeRO stage; with other numbers of ranks see ``tests/e2e/test_checkpoint_ranks.py``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import CheckpointError
from tests.checkpoint_support import TOLERANCE, optimizer_state, save, started, train, weights
from tests.learner_support import largest_difference, write_model
from tests.unit.learner.test_checkpoint import Intruder


@pytest.fixture(scope="module")
def saved(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any], float]:
    """A checkpoint of stage 2 after two steps; the weights then, and after two more steps, and the KL coefficient."""
    folder = tmp_path_factory.mktemp("saved") / "learner"
    learner = started(tiny_model, 2)
    train(learner, 0, 2)
    save(learner, folder, 2)
    then = weights(learner)
    train(learner, 2, 4)
    after, kl = weights(learner), learner._started.kl.coefficient
    learner.close()
    return folder, then, after, kl


@pytest.mark.parametrize("stage", [0, 3])
def test_another_stage_has_the_same_state_and_goes_on_alike(tiny_model: str, saved: Any, tmp_path: Path, stage: int) -> None:
    folder, then, after, kl = saved
    learner = started(tiny_model, stage)
    assert learner.load_checkpoint(str(folder)) == 2
    found = weights(learner)
    assert found.keys() == then.keys()
    assert [name for name, tensor in then.items() if not torch.equal(tensor, found[name])] == []
    save(learner, tmp_path / "again", 2)
    expected, state = optimizer_state(learner, folder), optimizer_state(learner, tmp_path / "again")
    assert {float(step) for name, step in expected.items() if name.endswith(" step")} == {1.0, 2.0}  # the critic is one ahead
    assert sum(name.endswith(" exp_avg_sq") for name in expected) == sum(name.startswith(("policy", "critic")) for name in then)
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])] == []
    train(learner, 2, 4)
    assert largest_difference(after, weights(learner)) < TOLERANCE
    assert learner._started.kl.coefficient == pytest.approx(kl)
    learner.close()


def test_a_checkpoint_from_before_the_first_update(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model, 1)
    save(learner, tmp_path, 0)
    train(learner, 0, 2)
    expected = weights(learner)
    learner.close()
    learner = started(tiny_model, 0)
    assert learner.load_checkpoint(str(tmp_path)) == 0
    train(learner, 0, 2)
    assert largest_difference(expected, weights(learner)) < TOLERANCE
    learner.close()


def refused(tiny_model: str, folder: Path, reason: str) -> None:
    learner = started(tiny_model, 3)
    with pytest.raises(CheckpointError, match=reason):
        learner.load_checkpoint(str(folder))
    learner.close()


def test_code_in_it_is_not_run(tiny_model: str, saved: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "saved")
    part = "policy/state/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Intruder(tmp_path / "intruded")}, folder / part)
    refused(tiny_model, folder, f"{part} cannot be read")
    assert not (tmp_path / "intruded").exists()


def test_a_missing_part_is_named(tiny_model: str, saved: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "saved")
    (folder / "critic" / "state" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    refused(tiny_model, folder, r"critic/state has the optimizer's parts of ranks \[\], not of all 1")


def test_the_checkpoint_of_another_model(saved: Any, tmp_path: Path) -> None:
    deeper = write_model(tmp_path / "deeper", num_hidden_layers=3)
    refused(deeper, saved[0], r"has no parameter model.model.layers.2.* of another model")
