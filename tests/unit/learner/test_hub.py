"""The model of a checkpoint as a Hugging Face directory is the model that the learner itself would have saved."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.learner.export import export_checkpoint
from tests.checkpoint_support import save, started, train
from tests.learner_support import largest_difference, make_settings, write_model
from tests.unit.learner.test_checkpoint import saved


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "bfloat16"), (3, "float32")])
def test_it_is_what_the_learner_saves(tiny_model: str, tmp_path: Path, stage: int, dtype: str) -> None:
    learner = started(tiny_model, stage, dtype=dtype)
    train(learner, 0, 2)
    save(learner, tmp_path / "checkpoint", 2)
    learner.save_model(str(tmp_path / "model"))
    settings = learner.settings
    learner.close()
    for suffix in ("", "-ema"):
        export_checkpoint(tmp_path / "checkpoint", settings, tmp_path / f"out{suffix}", average=bool(suffix), dtype=dtype)
        expected, found = tmp_path / f"model{suffix}", tmp_path / f"out{suffix}"
        assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}
        left, right = (load_file(path / "model.safetensors") for path in (expected, found))
        assert left.keys() == right.keys()
        assert [name for name, tensor in left.items() if tensor.dtype != right[name].dtype or not torch.equal(tensor, right[name])] == []
        assert json.loads((found / "config.json").read_text()) == json.loads((expected / "config.json").read_text())
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w4", return_tensors="pt").input_ids
    logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("out", "model")]
    assert torch.equal(*logits)


def test_bfloat16_weights_come_out_as_precise_as_they_were_trained(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model, 1, dtype="bfloat16")
    train(learner, 0, 2)
    save(learner, tmp_path / "checkpoint", 2)
    coarse = {name: tensor.clone() for name, tensor in learner._started.named_weights()}
    settings = learner.settings
    learner.close()
    export_checkpoint(tmp_path / "checkpoint", settings, tmp_path / "out", average=False, dtype="float32")
    fine = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters())
    assert all(torch.equal(fine[name].bfloat16(), tensor) for name, tensor in coarse.items())
    assert 0 < largest_difference({name: tensor.float() for name, tensor in coarse.items()}, {name: fine[name] for name in coarse}) < 0.01


def test_what_does_not_fit_is_refused(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model, 2)
    save(learner, tmp_path / "checkpoint", 0)
    learner.close()
    wider = make_settings(write_model(tmp_path / "wider", hidden_size=64))
    with pytest.raises(CheckpointError, match=r"checkpoint does not fit .*wider"):
        export_checkpoint(tmp_path / "checkpoint", wider, tmp_path / "out", average=False, dtype="float32")
    saved(tiny_model, tmp_path / "plain")
    with pytest.raises(ConfigError, match="--ema"):
        export_checkpoint(tmp_path / "plain", make_settings(tiny_model), tmp_path / "out", average=True, dtype="float32")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_full_disk_leaves_nothing(tiny_model: str, tmp_path: Path) -> None:
    saved(tiny_model, tmp_path / "checkpoint")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            export_checkpoint(tmp_path / "checkpoint", make_settings(tiny_model), tmp_path / "out", average=False, dtype="float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
