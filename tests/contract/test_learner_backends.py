"""Promises of every learner back-end: each test runs with all of them, on the bundled model, and both have the same weights."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import agentrl.learner
from agentrl.assets import tiny_model_path
from agentrl.core.errors import CheckpointError, ConfigError, NonFiniteError
from agentrl.core.types import Group
from agentrl.learner.backends import BACKENDS, BackendName, facts_of_backend
from agentrl.learner.engine import Backend, backend_of
from agentrl.learner.export import export_checkpoint
from agentrl.learner.learner import LearnerRank
from agentrl.resolve.commands import load_config
from tests.learner_support import CollectingSender, cut_short, largest_difference, make_groups, make_settings

EVERYTHING: dict[str, Any] = {
    "learner": {"ema_decay": 0.5, "critic_warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5, "lr_schedule": "cosine"},
    "algo": {"advantage_estimator": "gae", "init_kl_coef": 0.1, "kl_target": 0.01, "ref_reset_every": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches, clipped": {"learner": {"micro_batch_tokens": 40, "max_grad_norm": 0.05, "weight_decay": 0.1, "lr_warmup_steps": 2}},
    "everything": EVERYTHING,
    "several updates": {"algo": {"mini_batches": 2, "ppo_epochs": 2}, "learner": {"gradient_checkpointing": True}},
    "muon": {"learner": {"optimizer": "muon", "weight_decay": 0.1}},
    "adafactor": {"learner": {"optimizer": "adafactor"}},
    "adapter": {"lora": {"lora_rank": 4, "lora_dropout": 0.1}, "learner": {"ema_decay": 0.5}, "algo": {"init_kl_coef": 0.1}},
}
NAMES = list(BACKENDS)


def started(backend: str, **changes: Any) -> LearnerRank:
    learner = {"learner_backend": backend, **changes.pop("learner", {})}
    rank = LearnerRank(make_settings(str(tiny_model_path()), learner=learner, **changes), CollectingSender())
    rank.start(0, 1, 0)
    return rank


def train(rank: LearnerRank, first: int, last: int) -> list[dict[str, float]]:
    return [dict(rank.train(step, *groups(step)).metrics) for step in range(first, last)]


def groups(step: int) -> tuple[Group, ...]:
    return cut_short(make_groups(4, 3, seed=step, version=step))


def weights(rank: LearnerRank) -> dict[str, torch.Tensor]:
    """Everything that decides the next step: weights of all models, optimizer, moving average."""
    state = rank._started
    named = state.backend.parameters.named
    found = {f"policy {name}": tensor.clone() for name, tensor in named(state.policy)}
    if state.models.critic is not None:
        found |= {f"critic {name}": tensor.clone() for name, tensor in named(state.models.critic.module)}
    if isinstance(state.models.reference, torch.nn.Module):
        found |= {f"reference {name}": tensor.clone() for name, tensor in named(state.models.reference)}
    if state.average is not None:
        found |= {f"average {name}": tensor.clone() for name, tensor in state.average.weights()}
    return found | {f"state {number}": tensor.clone() for number, tensor in enumerate(state.models.policy.tensors())}


def test_the_setting_has_every_backend_and_each_is_found_by_its_name() -> None:
    assert set(get_args(BackendName)) == set(BACKENDS)
    for name in BACKENDS:
        assert isinstance(backend_of(name), Backend)
        assert callable(facts_of_backend(name).check)


@pytest.mark.parametrize("case", list(CASES))
def test_all_have_the_same_weights(case: str) -> None:
    found: dict[str, tuple[dict[str, torch.Tensor], list[dict[str, float]]]] = {}
    for name in BACKENDS:
        rank = started(name, **dict(CASES[case]))
        metrics = train(rank, 0, 3)
        found[name] = weights(rank), metrics
        rank.close()
    expected, figures = found["deepspeed"]
    for own, metrics in found.values():
        assert largest_difference(own, expected) == 0.0  # 1e-6 would do; the numbers are computed in the same order
        for step, before in zip(metrics, figures, strict=True):
            same = {key: value for key, value in before.items() if not key.startswith("time/")}
            assert {key: step[key] for key in same} == pytest.approx(same, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("case", ["everything", "muon", "adafactor", "adapter"])
@pytest.mark.parametrize("backend", NAMES)
def test_a_checkpoint_goes_on_bit_for_bit(backend: str, case: str, tmp_path: Path) -> None:
    rank = started(backend, **dict(CASES[case]))
    train(rank, 0, 2)
    rank.save_checkpoint(str(tmp_path), 2)
    files = rank.flush_checkpoint(str(tmp_path))
    assert set(files) == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    train(rank, 2, 4)
    expected = weights(rank)
    rank.close()
    other = started(backend, **dict(CASES[case]))
    assert other.load_checkpoint(str(tmp_path)) == 2
    train(other, 2, 4)
    assert largest_difference(weights(other), expected) == 0.0
    other.close()


@pytest.mark.parametrize(("wrote", "reads"), [(wrote, reads) for wrote in NAMES for reads in NAMES if wrote != reads])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_goes_on_with_another_backend(wrote: str, reads: str, stage: int, tmp_path: Path) -> None:
    def own(backend: str) -> LearnerRank:
        zero = {} if backend == "torch" else {"zero_stage": stage}
        return started(backend, algo=EVERYTHING["algo"], learner=EVERYTHING["learner"] | zero)

    rank = own(wrote)
    train(rank, 0, 2)
    rank.save_checkpoint(str(tmp_path), 2)
    before = weights(rank)
    train(rank, 2, 3)
    expected = weights(rank)
    rank.close()
    other = own(reads)
    assert other.load_checkpoint(str(tmp_path)) == 2
    mine = {name for name in before if not name.startswith("state")}  # those of ZeRO are flattened
    assert largest_difference({name: weights(other)[name] for name in mine}, {name: before[name] for name in mine}) == 0.0
    train(other, 2, 3)
    found = weights(other)
    assert largest_difference({name: found[name] for name in mine}, {name: expected[name] for name in mine}) < 1e-4
    other.close()


def test_the_state_of_another_optimizer_than_adamw_is_for_one_backend(tmp_path: Path) -> None:
    rank = started("torch", **dict(CASES["muon"]))
    train(rank, 0, 1)
    rank.save_checkpoint(str(tmp_path), 1)
    rank.close()
    other = started("deepspeed", **dict(CASES["muon"]))
    with pytest.raises(CheckpointError, match="--optimizer muon is of --num-learners 1, --learner-backend torch; resume with the same"):
        other.load_checkpoint(str(tmp_path))
    other.close()


@pytest.mark.parametrize("case", ["everything", "adapter"])
@pytest.mark.parametrize("backend", NAMES)
def test_an_export_has_the_weights_that_are_published(backend: str, case: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    rank = started(backend, **dict(CASES[case]))
    train(rank, 0, 1)
    settings = rank.settings
    (tmp_path / "checkpoint").mkdir()
    rank.save_checkpoint(str(tmp_path / "checkpoint"), 1)
    rank.save_model(str(tmp_path / "model"))
    rank.export_weights(1)
    published = rank._sender.weights  # type: ignore[attr-defined]
    rank.close()
    merge = case == "adapter"
    assert export_checkpoint(tmp_path / "checkpoint", settings, tmp_path / "exported", merge=merge) > 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert largest_difference(exported, {name: published[name] for name in exported}) == 0.0
    if not merge:
        assert largest_difference(load_file(tmp_path / "model" / "model.safetensors"), exported) == 0.0
    export_checkpoint(tmp_path / "checkpoint", settings, tmp_path / "average", average=True)
    saved, average = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("model-ema", "average"))
    assert largest_difference(saved, average) == 0.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("backend", NAMES)
def test_the_memory_of_a_model_is_what_is_planned(backend: str, optimizer: str) -> None:
    rank = started(backend, learner={"optimizer": optimizer})
    train(rank, 0, 1)
    engine = rank._started.models.policy
    model: Any = rank._started.policy
    size, outside = sum(weight.numel() for weight in engine.module.parameters()), model.get_input_embeddings().weight.numel()
    assert model.config.tie_word_embeddings
    planned = facts_of_backend(backend).states(size, rank.settings.learner, width=4, outside=outside)
    held = sum(part.nbytes for part in engine.tensors())
    rank.close()
    assert planned[0] == planned[1] == 4 * size
    assert held == pytest.approx(
        planned[0] + planned[2], rel=0.05
    )  # vectors are updated by another rule, and Adafactor keeps rows and columns


@pytest.mark.parametrize("backend", NAMES)
def test_moving_out_of_the_device_and_back_changes_nothing(backend: str) -> None:
    rank = started(backend, **EVERYTHING)
    train(rank, 0, 1)
    before = weights(rank)
    for keep_weights in (True, False, False):
        rank.offload(keep_weights)
    rank.reload()
    assert largest_difference(weights(rank), before) == 0.0
    train(rank, 1, 2)
    rank.close()


@pytest.mark.parametrize("backend", NAMES)
def test_a_gradient_that_is_not_finite_changes_nothing_and_several_end_the_run(backend: str) -> None:
    rank = started(backend)
    engine = rank._started.models.policy
    before = weights(rank)
    model: Any = engine.module
    parameter = next(model.parameters())
    engine.accumulate(parameter.sum() * math.nan, last=True)
    assert engine.update(0.1) is None
    engine.accumulate(parameter.sum() * math.nan, last=True)
    assert engine.update(0.1) is None
    engine.accumulate(parameter.sum() * math.inf, last=True)
    with pytest.raises(NonFiniteError, match="was not finite for 3 updates in a row"):
        engine.update(0.1)
    assert largest_difference(weights(rank), before) == 0.0
    rank.close()


@pytest.mark.parametrize("backend", NAMES)
def test_a_closed_learner_holds_no_weights(backend: str) -> None:
    rank = started(backend)
    train(rank, 0, 1)
    module = rank._started.models.policy.module
    rank.close()
    rank.close()
    assert not any(parameter.numel() for parameter in module.parameters())


REFUSED = {
    "--num-learners": "2",
    "--zero-stage": "2",
    "--deepspeed-args": "deepcompile",
    "--sequence-parallel": "2",
    "--learner-tensor-parallel": "2",
    "--tiled-mlp": None,
    "--offload": "optimizer",
}


@pytest.mark.parametrize("flag", list(REFUSED))
def test_torch_refuses_by_name_what_only_deepspeed_does(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.engine_rules.may_have_gpus", lambda config: True)
    words = ["--agent", "module:Name", "--learner-backend", "torch", flag, *filter(None, [REFUSED[flag]])]
    with pytest.raises(
        ConfigError, match=rf"^{flag} = (2|True|\('deepcompile',\)|'optimizer'): needs DeepSpeed. Leave out --learner-backend torch, or "
    ):
        load_config(words)


def test_torch_trains_in_float32_without_zero() -> None:
    words = ["--agent", "module:Name", "--learner-backend", "torch"]
    learner = load_config(words).learner
    assert (learner.zero_stage, learner.dtype("cuda")) == (0, "float32")
    assert load_config(["--agent", "module:Name"]).learner.dtype("cuda") == "bfloat16"
    with pytest.raises(ConfigError, match=r"^--learner-dtype = 'bfloat16': needs DeepSpeed"):
        load_config([*words, "--learner-dtype", "bfloat16"])


ALONE = """
import sys
from pathlib import Path
from agentrl.learner.export import export_checkpoint
from tests.contract.test_learner_backends import started, train
folder = Path(sys.argv[1])
for number, lora in enumerate(({}, {"lora_rank": 2})):
    rank = started("torch", lora=lora)
    train(rank, 0, 1)
    rank.save_checkpoint(str(folder), 1)
    rank.save_model(str(folder / "model"))
    rank.close()
    export_checkpoint(folder, rank.settings, folder / f"exported-{number}", merge=bool(lora))
print([name for name in sys.modules if name.split(".")[0] == "deepspeed"], "agentrl.learner.deepspeed.engine" in sys.modules)
"""


def test_torch_alone_imports_no_deepspeed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout == "[] False\n", done.stderr


def test_the_learner_names_no_backend_outside_of_their_folders() -> None:
    """What all back-ends share imports none of them, and ZeRO's words are those of settings."""
    root = Path(agentrl.learner.__file__).parent
    folders = {package.rpartition(".")[2] for package in BACKENDS.values()}
    for path in root.glob("*.py"):
        imported = {name for node in ast.walk(ast.parse(path.read_text())) for name in _imported(node)}
        assert not [name for name in imported if name.startswith(tuple(f"agentrl.learner.{folder}" for folder in folders))], path
        known: Mapping[str, bool] = {"plan.py": True, "settings.py": True, "optimizer_table.py": True}
        assert known.get(path.name, False) or "zero_stage" not in path.read_text(), path


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
