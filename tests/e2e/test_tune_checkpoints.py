"""Checkpoints of training on given data go on with another number of ranks, from one to two and back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from agentrl.config.methods import METHODS
from agentrl.resolve.tune import load_given
from agentrl.tune.directory import CHECKPOINTS, RunDirectory
from agentrl.tune.row_table import Prepared
from tests.e2e.runs import ROOT, command
from tests.learner_support import write_shifted
from tests.ports import free_ports

DATA = ROOT / "examples" / "tune"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("chats", {}),
    "dpo": ("pairs", {"lora_rank": 4}),
    "reward-model": ("helpful", {"weight_decay": 0.1}),
    "kto": ("labelled", {}),
    "orpo": ("pairs", {}),
    "process-reward-model": ("steps", {}),
    "distill": ("chats", {"lora_rank": 4}),
}
SAVE = 4


def plan_of(method: str, folder: Path, num_ranks: int, zero_stage: int) -> Any:
    data, own = RUNS[method]
    own = own | ({"teacher": str(folder / "teacher")} if method == "distill" else {})
    given = {"data": str(DATA / f"{data}.jsonl"), "run_dir": folder / method, "num_steps": 6, "learning_rate": 1e-3, **own}
    return load_given(METHODS[method], {**given, "num_ranks": num_ranks, "zero_stage": zero_stage})


def state_of(plan: Any, rank: int, port: int, checkpoint: Path | None) -> Any:
    from agentrl.learner.engine import join
    from agentrl.tune.loop import start
    from agentrl.tune.prepare import make_tokenizer

    ranks = join(
        plan.learner.learner_backend, rank, plan.ranks.num_ranks, master_port=port, master_addr="127.0.0.1", device="cpu", timeout_s=300.0
    )
    return start(
        plan,
        Prepared((), (), {}, ()),
        RunDirectory(plan.run_dir, checkpoint, ()),
        6,
        ranks,
        make_tokenizer(plan.settings.model, ""),
    )


def trained(method: str, plan: Any, state: Any, steps: range) -> None:
    from agentrl.tune.learner_rows import RowMaker
    from tests.unit.tune.plans import rows_of

    (rows,) = rows_of(plan).parts
    for step in steps:
        state.train_rows(step, RowMaker(method)(rows[step * 4 : step * 4 + 4]))


def saved(state: Any, folder: Path, step: int) -> Path:
    from agentrl.learner.checkpoint import save_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(state, folder, step)
    return folder


def carried(rank: int, size: int, zero_stage: int, ports: list[int], folder: Path, source: str, target: str) -> None:
    """Load what is saved under a name, save it again in this layout, and save it once more after two further steps."""
    for method in RUNS:
        plan = plan_of(method, folder, size, zero_stage)
        step, begin = (0, None) if not source else (SAVE, folder / source / method / f"checkpoint-{SAVE}")
        state = state_of(plan, rank, ports.pop(), begin)
        if not source:
            trained(method, plan, state, range(SAVE))
            step = SAVE
        saved(state, folder / target / method / f"checkpoint-{step}", step)
        trained(method, plan, state, range(SAVE, SAVE + 2))
        saved(state, folder / target / method / f"checkpoint-{step + 2}", step + 2)
        state.close()


LAYOUTS = [("one", 1, 0), ("two", 2, 2), ("again", 1, 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, source = tmp_path_factory.mktemp("layouts"), ""
    write_shifted(path / "teacher")
    for name, size, stage in LAYOUTS:
        mp.spawn(carried, args=(size, stage, free_ports(len(RUNS)), path, source, name), nprocs=size)
        source = name
    return path


def contents(method: str, folder: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights, both moments and the number of updates of a checkpoint, by parameter."""
    from agentrl.learner.backends import DEEPSPEED
    from agentrl.learner.engine import backend_of
    from agentrl.learner.saved import BACKEND_KEY, MOMENTS, read_tensors

    plan = plan_of(method, folder, 1, 0)
    state = state_of(plan, 0, 0, None)
    layout = read_tensors(checkpoint / "rank-0.pt")["layout"]
    module = state.models.policy.module
    found = backend_of(layout.get(BACKEND_KEY, DEEPSPEED)).saved(checkpoint / "policy", layout, module, state.settings.learner)
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    tensors = {name: found[name].detach().view(parameter.shape).clone() for name, parameter in named}
    moments = {f"{name} {key}": found.moment(name, key).detach().flatten().clone() for name, _ in named for key in MOMENTS}
    state.close()
    return {**tensors, **moments, **{f"{name} step": torch.tensor(found.step(name)) for name, _ in named}}


@pytest.mark.parametrize("method", RUNS)
def test_weights_and_optimizer_are_carried_over_exactly_and_training_goes_on_alike(method: str, folder: Path) -> None:
    states = {
        (name, step): contents(method, folder, folder / name / method / f"checkpoint-{step}")
        for name, *_ in LAYOUTS
        for step in (SAVE, SAVE + 2)
    }
    first = states["one", SAVE]
    assert {float(value) for name, value in first.items() if name.endswith(" step")} == {float(SAVE)}
    for name in ("two", "again"):
        assert states[name, SAVE].keys() == first.keys()
        assert [key for key, tensor in first.items() if not torch.equal(tensor, states[name, SAVE][key])] == []
        later, found = states["one", SAVE + 2], states[name, SAVE + 2]
        assert max(float((later[key].float() - found[key].float()).abs().max()) for key in later) < 1e-5


def run(*words: str) -> None:
    done = subprocess.run(command(*words), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def kept(source: Path, target: Path, step: int) -> Path:
    """A copy of a run as if it had been killed after a checkpoint."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "model")
    for path in (target / CHECKPOINTS).iterdir():
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)
    return target


def test_a_run_goes_on_with_two_ranks_and_back_with_its_schedule(tmp_path: Path) -> None:
    words = ["dpo", "--data", str(DATA / "pairs.jsonl"), "--num-steps", "6", "--batch-size", "4", "--eval-size", "4", "--save-every", "2"]
    words += ["--keep-checkpoints", "3", "--lr-schedule", "linear", "--learning-rate", "1e-3", "--no-tensorboard"]
    run(*words, "--run-dir", str(tmp_path / "once"))
    two = kept(tmp_path / "once", tmp_path / "two", 2)
    run("dpo", "--resume", str(two), "--num-ranks", "2")
    back = kept(two, tmp_path / "back", 4)
    run("dpo", "--resume", str(back), "--num-ranks", "1")
    once, *others = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (tmp_path / "once", two, back)
    )
    weights = load_file(tmp_path / "once" / "model" / "model.safetensors")
    for rows, folder in zip(others, (two, back), strict=True):
        assert [(row["step"], row.get("learning_rate")) for row in rows] == [(row["step"], row.get("learning_rate")) for row in once]
        for name in ("loss", "eval/loss", "grad_norm"):
            assert [row.get(name) for row in rows] == [each and pytest.approx(each, abs=1e-4) for each in (row.get(name) for row in once)]
        found = load_file(folder / "model" / "model.safetensors")
        assert max(float((found[name] - tensor).abs().max()) for name, tensor in weights.items()) < 1e-4
