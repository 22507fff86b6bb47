"""Ranks hash and copy what they wrote, and a run goes on from the copies with other ranks in another folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from agentrl.core.manifest import differing_files, flush_files, read_manifest
from tests.checkpoint_support import save, started, train
from tests.e2e.runs import ENVS, SMALL, Run, start, succeeded
from tests.e2e.runs import train as train_run
from tests.learner_support import write_model
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def flush_in_each_stage(rank: int, ports: list[int], model: str, folder: Path) -> None:
    for stage in range(4):
        learner = started(model, stage, rank=rank, world_size=2, port=ports.pop())
        train(learner, 0, 1)
        save(learner, folder / str(stage), 1)
        entries = learner.flush_checkpoint(str(folder / str(stage)))
        (folder / f"{stage}-{rank}.json").write_text(json.dumps(entries))
        learner.close()


def test_each_file_is_hashed_by_the_rank_that_wrote_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    mp.spawn(flush_in_each_stage, args=(free_ports(8), model, tmp_path), nprocs=2)
    for stage in range(4):
        folder = tmp_path / str(stage)
        first, second = (json.loads((tmp_path / f"{stage}-{rank}.json").read_text()) for rank in range(2))
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")}
        assert first.keys() | second.keys() == there
        assert not first.keys() & second.keys()
        assert "rank-0.pt" in first
        assert "rank-1.pt" in second
        assert {name for name in there if "zero_pp_rank_1" in name} <= second.keys()
        assert {name for name in there if "zero_pp_rank_0" in name} | {"reference.pt"} <= first.keys()
        assert first | second == flush_files(folder, there)


LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}


def adapted(rank: int, world_size: int, port: int, model: str, source: Path, target: Path, stage: int) -> None:
    """Train an adapter and save it to `source`, if that is not there; else load it from there; then save to `target`."""
    from agentrl.learner.learner import LearnerRank
    from tests.learner_support import CollectingSender, make_settings

    learner = LearnerRank(make_settings(model, learner={"zero_stage": stage, "ema_decay": 0.5}, lora=LORA), CollectingSender())
    learner.start(rank, world_size, port)
    if (source / "rank-0.pt").exists():
        assert learner.load_checkpoint(str(source)) == 2
    else:
        train(learner, 0, 2)
    save(learner, target, 2)
    state = learner._started
    averages = {name: tensor.clone() for name, tensor in state.average.weights()} if state.average else {}
    whole = {name: tensor.clone() for name, tensor in state.named_weights()}
    if rank == 0:
        torch.save((whole, averages, moments(learner, target)), target.with_suffix(".pt"))
    learner.close()


def moments(learner: Any, folder: Path) -> dict[str, Any]:
    """Float32 weights and both moments of every trained parameter in a checkpoint."""
    from agentrl.learner.deepspeed.saved import saved_engine
    from agentrl.learner.saved import MOMENTS, read_tensors

    module = learner._started.models.policy.module
    saved = saved_engine(folder / "policy", read_tensors(folder / "rank-0.pt")["layout"], module, learner.settings.learner)
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found[name] = saved[name].clone()
            found |= {f"{name} {key}": saved.moment(name, key).clone() for key in MOMENTS}
    return found


@pytest.mark.parametrize(("before", "after"), [((1, 2), (2, 3)), ((2, 3), (1, 0)), ((2, 1), (1, 2)), ((1, 0), (2, 2))])
def test_an_adapter_goes_on_with_other_ranks_bit_for_bit(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    model = write_model(tmp_path / "model")
    places = {before: tmp_path / "first", after: tmp_path / "second"}
    for world_size, stage in (before, after):
        source, target = tmp_path / "first", places[world_size, stage]
        mp.spawn(adapted, args=(world_size, free_ports(1)[0], model, source, target, stage), nprocs=world_size)
    (once, averages, state), (again, same_averages, same_state) = (torch.load(tmp_path / f"{name}.pt") for name in ("first", "second"))
    for expected, found in ((once, again), (averages, same_averages), (state, same_state)):
        assert expected.keys() == found.keys()
        assert expected
        assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_a_run_goes_on_from_its_copies_elsewhere_with_other_ranks(tmp_path: Path) -> None:
    address = tmp_path / "copies"
    more = ("--save-every", "2", "--checkpoint-upload", f"file://{address}", *SMALL)
    first = succeeded(train_run(tmp_path / "first", "--num-steps", "2", "--num-learners", "2", "--zero-stage", "3", *more, fork=False))
    copy = address / "step-00000002"
    files = read_manifest(copy)
    assert files == read_manifest(first.directory / "checkpoints" / copy.name)
    assert differing_files(files, copy) == []
    assert {entry.get("rank") for name, entry in files.items() if name.endswith(".pt")} == {0, 1}
    exported = export(first.directory, tmp_path / "exported")
    shutil.rmtree(first.directory)
    words = ("--resume", f"file://{address}", "--run-dir", str(tmp_path / "second"), "--num-steps", "4")
    process = start("train", *words, "--num-learners", "1", "--zero-stage", "2", "--runtime", "local")
    output, _ = process.communicate(timeout=300)
    second = succeeded(Run(process.returncode, output, tmp_path / "second"))
    assert [row["step"] for row in second.metrics] == [3, 4]
    assert export(second.directory / "checkpoints" / copy.name, tmp_path / "again") == exported
    assert sorted(path.name for path in address.iterdir()) == ["step-00000002", "step-00000004"]
    assert {entry.get("rank") for entry in read_manifest(address / "step-00000004").values()} == {None}
    words = ("--resume", "auto", "--run-dir", str(tmp_path / "third"), "--agent", str(ENVS / "arithmetic.py"), "--num-steps", "6")
    process = start("train", *words, "--num-learners", "2", "--zero-stage", "1", *more)
    output, _ = process.communicate(timeout=300)
    third = succeeded(Run(process.returncode, output, tmp_path / "third"))
    assert [row["step"] for row in third.metrics] == [5, 6]
    assert sorted(path.name for path in address.iterdir()) == ["step-00000004", "step-00000006"]
    assert third.metrics[-1]["checkpoint/upload_failures"] == 0.0


def export(source: Path, target: Path) -> bytes:
    process = start("export", str(source), str(target))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return (target / "model.safetensors").read_bytes()
