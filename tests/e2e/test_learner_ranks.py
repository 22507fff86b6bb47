"""Two and four processes with real DeepSpeed compute what one does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from agentrl.core.protocols import Membership
from tests.learner_support import CollectingSender, cut_short, gradients, largest_difference, make_groups, make_settings, write_model
from tests.ports import free_ports

GROUPS = make_groups(5, 3, seed=1)
STAGES = (0, 1, 2, 3)
FOUR_RANKS = {"init_kl_coef": 0.1, "advantage_estimator": "gae", "loss_aggregation": "seq-mean-token-mean"}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "reward-kl": {"learner": {"zero_stage": 3}, "algo": {"init_kl_coef": 0.1, "advantage_estimator": "reinforce", "off_policy": "m2po"}},
    "critic": {
        "learner": {"zero_stage": 2, "critic_warmup_steps": 1},
        "algo": {"advantage_estimator": "gae", "ppo_epochs": 2, "mini_batches": 2, "off_policy": "none"},
    },
    "average": {"learner": {"zero_stage": 3, "ema_decay": 0.5}, "algo": {"init_kl_coef": 0.1, "use_kl_loss": True, "ref_reset_every": 1}},
}

SHARDED: dict[str, dict[str, Any]] = {
    "second copy within a machine": {"zero_stage": 3, "deepspeed_args": ("zero_hpz_partition_size=2",)},
    "optimizer in CPU memory": {"zero_stage": 2, "offload": ("optimizer",)},
    "all in CPU memory": {"zero_stage": 3, "offload": ("optimizer", "reference", "ema"), "ema_decay": 0.5},
    "reference in CPU memory": {"zero_stage": 1, "offload": ("reference", "ema"), "ema_decay": 0.5},
}
"""Settings that change where things are, and nothing else."""

WIDE = (False, True)

pytestmark = pytest.mark.timeout(600)  # several processes start
LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.2}
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    f"adapter-{stage}": {"learner": {"zero_stage": stage, "ema_decay": 0.5}, "algo": {"init_kl_coef": 0.1}, "lora": LORA}
    for stage in (2, 3)
}


def train(name: str, model: str, out: Path, *, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    """Two steps; metrics, published weights and the saved model go to `out`."""
    from agentrl.learner.learner import LearnerRank

    sender = CollectingSender()
    learner = LearnerRank(make_settings(model, **(RUNS | ADAPTERS)[name]), sender)
    learner.start(rank, world_size, port)
    metrics: dict[str, float] = {}
    for step in range(2):
        metrics = dict(learner.train(step, *cut_short(make_groups(5, 3, seed=step, version=step))).metrics)
    learner.export_weights(2)
    learner.save_model(str(out / name))
    learner.close()
    if rank == 0:
        torch.save((metrics, sender.weights), out / f"{name}.pt")


def broadcast(model: str, out: Path, *, rank: int = 0, world_size: int = 1, port: int = 0, paired: bool = False) -> None:
    """Two steps under ZeRO-3, each published in buckets; what arrived after the second, and the saved model, go to `out`.

    Rank 0 sends to an engine as over NCCL; with `paired` each rank sends to an engine of its own, as over CUDA IPC.
    """
    from agentrl.learner.learner import LearnerRank
    from agentrl.weights.buckets import cut
    from tests.group_support import Engine, sender

    kind, engines = ("ipc", world_size) if paired else ("nccl", 1)
    learner_sender, name = sender(kind, rank=rank, bucket_bytes=5000), f"broadcast-{world_size}{'-paired' if paired else ''}"
    engine, members = Engine(f"engine-{rank}", kind), Membership(1, tuple(f"engine-{index}" for index in range(engines)))
    learner = LearnerRank(make_settings(model, learner={"zero_stage": 3}), learner_sender)
    learner.start(rank, world_size, port)
    for step in range(2):
        learner.train(step, *make_groups(5, 3, seed=step, version=step))  # waits for the publication before
        update = learner.export_weights(step + 1, members)
        assert update is not None
        assert len(cut(learner_sender._infos, 5000)) > 4
        if engine.name in members.engines:
            assert engine.take(update) == ""
    learner.save_model(str(out / name))  # waits too
    if rank == 0:
        torch.save(engine.loaded, out / f"{name}.pt")
    learner.close()


def everything(rank: int, ports: list[int], model: str, out: Path) -> None:
    """What a rank of two does; starting one costs more than all of this."""
    from agentrl.learner.deepspeed import loading

    loading.BUFFER_BYTES = 0  # under ZeRO-3 the second rank reads no weights at all
    for stage in STAGES:
        settings = make_settings(model, learner={"zero_stage": stage, "micro_batch_tokens": 60})
        torch.save(gradients(settings, GROUPS, rank=rank, world_size=2, port=ports.pop()), out / f"{stage}-{rank}.pt")
    for name in RUNS:
        train(name, model, out, rank=rank, world_size=2, port=ports.pop())
    for paired in (False, True) if find_spec("vllm") else ():
        broadcast(model, out, rank=rank, world_size=2, port=ports.pop(), paired=paired)
    for name in SHARDED:
        torch.save(gradients(sharded(model, name), GROUPS, rank=rank, world_size=2, port=ports.pop()), out / f"{name}-{rank}.pt")
    for wide in WIDE:
        settings = make_settings(
            model,
            learner={"zero_stage": 2, "learner_dtype": "bfloat16", "deepspeed_args": ("communication_data_type=fp32",) if wide else ()},
        )
        torch.save(gradients(settings, GROUPS, rank=rank, world_size=2, port=ports.pop()), out / f"{wide}-{rank}.pt")


def sharded(model: str, name: str) -> Any:
    return make_settings(model, learner=SHARDED[name] | {"micro_batch_tokens": 60}, algo={"init_kl_coef": 0.1})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    mp.spawn(everything, args=(free_ports(len(STAGES) + len(RUNS) + len(SHARDED) + len(WIDE) + 2), model, out), nprocs=2)
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_do_not_depend_on_the_number_of_ranks(model: str, two_ranks: Path, stage: int) -> None:
    alone = gradients(make_settings(model), GROUPS)
    for rank in (0, 1):
        assert largest_difference(alone, torch.load(two_ranks / f"{stage}-{rank}.pt")) < 1e-5


@pytest.mark.parametrize("name", SHARDED)
def test_where_things_are_kept_changes_no_gradient(model: str, two_ranks: Path, name: str) -> None:
    alone = gradients(make_settings(model, algo={"init_kl_coef": 0.1}), GROUPS)
    for rank in (0, 1):
        assert largest_difference(alone, torch.load(two_ranks / f"{name}-{rank}.pt")) < 1e-5


@pytest.mark.parametrize("wide", WIDE)
def test_gradients_of_bfloat16_are_summed_in_float32_if_asked(two_ranks: Path, wide: bool) -> None:
    """With one micro-batch for each rank, a sum in bfloat16 is a number of bfloat16."""
    found = torch.cat([gradient.flatten() for gradient in torch.load(two_ranks / f"{wide}-0.pt").values()])
    rounded = float((found != found.bfloat16().float()).float().mean())
    assert rounded > 0.3 if wide else rounded == 0.0


def on_four(rank: int, ports: list[int], model: str, out: Path) -> None:
    """Five groups of three on four ranks, in micro-batches so small that prompts are shared by some rows only."""
    settings = make_settings(model, learner={"zero_stage": 3, "micro_batch_tokens": 60}, algo=FOUR_RANKS)
    torch.save(gradients(settings, GROUPS, rank=rank, world_size=4, port=ports[0]), out / f"{rank}.pt")
    two_machines = make_settings(
        model, learner={"zero_stage": 3, "deepspeed_args": ("zero_hpz_partition_size=2",), "micro_batch_tokens": 60}
    )
    torch.save(gradients(two_machines, GROUPS, rank=rank, world_size=4, port=ports[1]), out / f"hpz-{rank}.pt")


@pytest.mark.slow
def test_gradients_of_four_ranks_are_those_of_one(model: str, tmp_path: Path) -> None:
    mp.spawn(on_four, args=(free_ports(2), model, tmp_path), nprocs=4)
    alone, plain = gradients(make_settings(model, algo=FOUR_RANKS), GROUPS), gradients(make_settings(model), GROUPS)
    for rank in range(4):
        assert largest_difference(alone, torch.load(tmp_path / f"{rank}.pt")) < 1e-5
        assert largest_difference(plain, torch.load(tmp_path / f"hpz-{rank}.pt")) < 1e-5


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_report_and_save_what_one_does(model: str, two_ranks: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    train(name, model, tmp_path)
    metrics, weights = torch.load(two_ranks / f"{name}.pt")
    expected, alone = torch.load(tmp_path / f"{name}.pt")
    # Adam divides tiny gradients by their own size, so rounding shows up enlarged in a few weights.
    assert largest_difference(alone, weights) < 1e-3
    saved = dict(AutoModelForCausalLM.from_pretrained(two_ranks / name).named_parameters())
    assert all(torch.equal(saved[key], weights[key]) for key in weights)
    same = [key for key in expected if not key.startswith("time/") and key not in ("padding", "micro_batches")]
    # One token at the edge of a clip range more or less changes a fraction by more than rounding.
    assert {key: metrics[key] for key in same} == pytest.approx({key: expected[key] for key in same}, rel=2e-3, abs=1e-2)
    if name == "average":
        averages = [dict(AutoModelForCausalLM.from_pretrained(out / "average-ema").named_parameters()) for out in (two_ranks, tmp_path)]
        assert largest_difference(*averages) < 1e-3


@pytest.mark.vllm
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_bring_every_byte_of_the_weights(model: str, two_ranks: Path, tmp_path: Path, ranks: int, paired: bool) -> None:
    from transformers import AutoModelForCausalLM

    out, name = two_ranks if ranks == 2 else tmp_path, f"broadcast-{ranks}{'-paired' if paired else ''}"
    if ranks == 1:
        broadcast(model, out, paired=paired)
    weights = torch.load(out / f"{name}.pt")
    saved = dict(AutoModelForCausalLM.from_pretrained(out / name).named_parameters())
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def with_adapter(rank: int, port: int, name: str, model: str, out: Path) -> None:
    train(name, model, out, rank=rank, world_size=2, port=port)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_two_ranks_train_publish_and_save_the_adapter_that_one_does(model: str, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file

    two_ranks = tmp_path / "two"
    two_ranks.mkdir()
    mp.spawn(with_adapter, args=(free_ports(1)[0], name, model, two_ranks), nprocs=2)
    train(name, model, tmp_path)
    (metrics, weights), (expected, alone) = torch.load(two_ranks / f"{name}.pt"), torch.load(tmp_path / f"{name}.pt")
    assert largest_difference(alone, weights) < 1e-3
    assert metrics["kl/reference"] == pytest.approx(expected["kl/reference"], rel=2e-3, abs=1e-4)
    base, saved = load_file(Path(model) / "model.safetensors"), load_file(two_ranks / name / "adapter_model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    a, b = (saved[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    assert torch.equal(weights[f"{layer}.weight"], base[f"{layer}.weight"] + 2.0 * (b @ a))
    average = load_file(two_ranks / f"{name}-ema" / "adapter_model.safetensors")
    assert {key: tensor.shape for key, tensor in average.items()} == {key: tensor.shape for key, tensor in saved.items()}
