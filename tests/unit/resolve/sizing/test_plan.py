"""Plans from configs alone: what fits, which flags help, and the check at the start of a run."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import find_shape
from agentrl.profile.plan_text import plan_lines
from agentrl.resolve.memory import gpu_bytes, memory_sign
from agentrl.resolve.sizing.memory import GIB, host_bytes, offloaded_bytes
from agentrl.resolve.sizing.plan import Hardware, Workload, divide, machine_bytes, make_plan, step_seconds
from agentrl.resolve.sizing.search import KEPT, remedies
from agentrl.resolve.sizing.speed import Range

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "docs" / "models"
SEVEN = str(MODELS / "qwen2.5-7b.json")
EIGHT = Hardware(gpus=8, gpu_bytes=80 * GIB)


@pytest.mark.parametrize(("name", "gpus"), [("qwen2.5-7b", 8), ("qwen2.5-72b", 32), ("qwen3-30b-a3b", 16)])
def test_large_models_are_planned_in_seconds(name: str, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.perf_counter()
    code = main(["plan", "--model", str(MODELS / f"{name}.json"), "--gpus", str(gpus), "--gpu-memory", "80", "--gradient-checkpointing"])
    assert time.perf_counter() - begin < 10
    said = capsys.readouterr().out
    assert code == (0 if "\nfits\n" in said else 1)
    assert ("\nfits\n" in said) == (name == "qwen2.5-7b")


def test_a_plan_that_does_not_fit_names_flags_with_which_it_does() -> None:
    config = divide(TrainConfig(), find_shape(SEVEN), EIGHT)
    plan = make_plan(config, find_shape(SEVEN), EIGHT, Workload())
    assert any("learner rank" in problem for problem in plan.problems)
    best = remedies(plan, Workload())[0]
    assert (best.plan.problems, best.kind) == ([], KEPT)
    assert best.flags == "--micro-batch-tokens 4096"  # quicker than to compute activations again
    again = make_plan(changed(config, **best.values), find_shape(SEVEN), EIGHT, Workload())
    assert again.learner_bytes == best.plan.learner_bytes


def test_too_many_gpus_and_too_narrow_engines_are_named() -> None:
    shape = find_shape(str(MODELS / "qwen2.5-72b.json"))
    config = changed(TrainConfig(), num_engines=4, num_learners=8, gradient_checkpointing=True)
    problems = " ".join(make_plan(config, shape, EIGHT, Workload()).problems)
    assert "12 GPUs, and there are 8" in problems
    assert "KV cache" in problems
    one_more = make_plan(
        changed(TrainConfig(), num_engines=1, num_learners=8, gradient_checkpointing=True), find_shape(SEVEN), EIGHT, Workload()
    )
    assert one_more.problems == ["engines and learner ranks need 9 GPUs, and there are 8"]


def test_engines_for_evaluations_take_gpus() -> None:
    shape = find_shape(SEVEN)
    given = changed(TrainConfig(), num_engines=1, num_learners=8, gradient_checkpointing=True)
    apart = changed(given, eval_every=5, eval_engines=2)
    assert make_plan(apart, shape, EIGHT, Workload()).gpus == make_plan(given, shape, EIGHT, Workload()).gpus + 2
    divided = divide(changed(TrainConfig(), eval_every=5, eval_engines=2), shape, EIGHT)
    assert divided.engine.num_engines + divided.learner.num_learners == 6
    assert "and 2 engines for evaluations" in " ".join(plan_lines(make_plan(apart, shape, EIGHT, Workload()), Workload()))


def test_a_machine_holds_what_all_of_its_ranks_offload() -> None:
    shape = find_shape(SEVEN)
    config = changed(TrainConfig(), num_learners=16, zero_stage=3, offload=("optimizer",))
    each = offloaded_bytes(config, shape)
    assert each > 0
    assert machine_bytes(config, shape, 8) == host_bytes(config, shape) + 7 * each
    assert machine_bytes(config, shape, 32) == host_bytes(config, shape) + 15 * each


def test_every_saving_saves() -> None:
    values: dict[str, object]
    shape = find_shape(SEVEN)
    base = changed(TrainConfig(), num_learners=4)
    least = make_plan(base, shape, EIGHT, Workload()).learner_bytes
    savings = [{"gradient_checkpointing": True}, {"zero_stage": 3}, {"micro_batch_tokens": 8192}, {"offload": ("optimizer",)}]
    for values in [*savings, {"num_learners": 8}]:
        assert make_plan(changed(base, **values), shape, EIGHT, Workload()).learner_bytes < least
    for values in ({"init_kl_coef": 0.1}, {"advantage_estimator": "gae"}, {"ema_decay": 0.9}, {"zero_stage": 1}):
        assert make_plan(changed(base, **values), shape, EIGHT, Workload()).learner_bytes > least
    away = {"init_kl_coef": 0.1, "offload": ("reference", "ema"), "ema_decay": 0.9}
    assert make_plan(changed(base, **away), shape, EIGHT, Workload()).learner_bytes == least
    assert host_bytes(changed(base, **away), shape) == 6 * shape.parameters  # the reference in bfloat16, the average in float32
    assert host_bytes(changed(base, learner_dtype="float32", offload=("reference",)), shape) == 4 * shape.parameters
    assert make_plan(changed(base, learner_tensor_parallel=2), shape, EIGHT, Workload()).learner_bytes < least
    sharded = changed(base, zero_stage=3)
    second = make_plan(changed(sharded, deepspeed_args=("zero_hpz_partition_size=2",)), shape, EIGHT, Workload()).learner_bytes
    assert second - make_plan(sharded, shape, EIGHT, Workload()).learner_bytes == shape.parameters


def test_seconds_follow_from_the_rates_that_are_given() -> None:
    shape = find_shape(SEVEN)
    config = changed(TrainConfig(), num_learners=4, num_engines=4)
    plan = make_plan(config, shape, EIGHT, Workload())
    assert step_seconds(plan, Workload()) == {}
    rates = Workload(learner_tflops=400.0, decode_tokens_per_s=5000.0)
    found = step_seconds(plan, rates)
    generate, train = found["generate"], found["train"]
    assert generate.low == generate.high == pytest.approx(128 * 1024 / 20000)
    assert train.low == train.high == pytest.approx(6 * shape.active_parameters * 128 * 1536 / 1.6e15, rel=0.1)
    assert found["step"] == Range(generate.low + train.low, generate.high + train.high)
    ahead = make_plan(changed(config, asynchronous=True), shape, EIGHT, rates)
    assert step_seconds(ahead, rates)["step"].low == max(generate.low, train.low)


def test_a_run_that_cannot_fit_is_refused_before_it_loads() -> None:
    config = changed(TrainConfig(), model=SEVEN, num_learners=4)
    with pytest.raises(ConfigError, match="Add --micro-batch-tokens 4096: then a learner rank needs"):
        memory_sign(config, 80 * GIB)
    sign = memory_sign(changed(config, skip_checks=("memory",)), 80 * GIB)
    assert sign is not None
    assert "--micro-batch-tokens" in sign.remedy
    assert memory_sign(changed(config, gradient_checkpointing=True), 80 * GIB) is None
    assert memory_sign(changed(config, model="some/model-that-is-not-here"), 80 * GIB) is None
    assert memory_sign(TrainConfig(), 8 * GIB) is None


def test_a_machine_without_gpus_has_no_memory_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 0)
    assert gpu_bytes() == 0.0
    assert memory_sign(changed(TrainConfig(), model=SEVEN), 0.0) is None


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n\$ agentrl (plan [^\n]+)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    for words, shown in blocks:
        main(words.split())
        assert capsys.readouterr().out == shown


def test_an_engine_that_shares_a_gpu_gets_what_the_learner_leaves() -> None:
    """Written out: with turns the learner keeps its process and the frozen reference; without, all that it ever needs."""
    shape = find_shape(SEVEN)
    base = changed(TrainConfig(), num_engines=8, num_learners=8, colocate=True, gradient_checkpointing=True, init_kl_coef=0.1)
    gpu = EIGHT.gpu_bytes
    turns = make_plan(base, shape, EIGHT, Workload())
    kept = GIB + 2 * shape.parameters
    assert turns.sized.weights.learner_memory_gib == pytest.approx(kept / GIB)
    assert turns.engine.cache == pytest.approx(0.95 * gpu - kept - 2 * shape.parameters - 2.5 * GIB)
    both = make_plan(changed(base, sleep_level=0), shape, EIGHT, Workload())
    assert both.sized.weights.learner_memory_gib == pytest.approx(both.learner_bytes / GIB)
    assert both.engine.cache == pytest.approx(0.95 * gpu - both.learner_bytes - 2 * shape.parameters - 2.5 * GIB)
    chosen = make_plan(changed(base, gpu_memory_utilization=0.5), shape, EIGHT, Workload())
    assert chosen.engine.cache == pytest.approx(0.5 * gpu - 2 * shape.parameters - 2.5 * GIB)
    moved = make_plan(changed(base, offload=("reference",)), shape, EIGHT, Workload())
    assert moved.engine.cache - turns.engine.cache == pytest.approx(2 * shape.parameters)
    assert not turns.problems


def test_weights_of_both_have_to_fit_during_a_publication() -> None:
    shape = find_shape(SEVEN)
    base = changed(
        TrainConfig(), num_engines=2, num_learners=2, colocate=True, zero_stage=3, micro_batch_tokens=1024, offload=("optimizer",)
    )
    small = Hardware(gpus=2, gpu_bytes=24 * GIB)
    (problem,) = [problem for problem in make_plan(base, shape, small, Workload()).problems if "publication" in problem]
    assert problem.startswith("the weights of a learner rank and of its engine need ")
    assert not [problem for problem in make_plan(base, shape, EIGHT, Workload()).problems if "publication" in problem]
