"""Two learner ranks, saved and started again, go on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.learner_support import CollectingSender, make_groups, make_settings, write_model
from tests.ports import free_ports

CHANGES = {"learner": {"zero_stage": 3, "ema_decay": 0.5}, "algo": {"init_kl_coef": 0.1, "ref_reset_every": 1}}


def go(rank: int, port: int, model: str, folder: Path, resume: bool) -> None:
    """Two steps, a checkpoint, two more; or the checkpoint and the two more."""
    from agentrl.learner.learner import LearnerRank

    sender = CollectingSender()
    learner = LearnerRank(make_settings(model, **CHANGES), sender)
    learner.start(rank, 2, port)
    if resume:
        assert learner.load_checkpoint(str(folder)) == 2
    for step in range(2 if resume else 0, 4):
        learner.train(step, *make_groups(5, 3, seed=step, version=step))
        if step == 1:
            learner.save_checkpoint(str(folder), 2)
    learner.export_weights(4)
    learner.save_model(str(folder.parent / f"model-{resume}"))
    learner.close()
    if rank == 0:
        torch.save(sender.weights, folder.parent / f"weights-{resume}.pt")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_continue_with_the_same_bits(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, folder = write_model(tmp_path / "model"), tmp_path / "saved"
    folder.mkdir()
    for resume in (False, True):
        mp.spawn(go, args=(free_ports(1)[0], model, folder, resume), nprocs=2)
    once, twice = (torch.load(tmp_path / f"weights-{resume}.pt") for resume in (False, True))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
    once, twice = (load_file(tmp_path / f"model-{resume}-ema" / "model.safetensors") for resume in (False, True))
    assert all(torch.equal(once[name], twice[name]) for name in once)
