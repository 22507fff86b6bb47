"""The search for settings with which a run fits, and the speeds by which it compares them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.load import read_flags
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import find_shape
from agentrl.core.paths import CACHE
from agentrl.resolve.commands import TRAIN, load_config
from agentrl.resolve.plan import with_defaults
from agentrl.resolve.sizing import search
from agentrl.resolve.sizing.memory import GIB, adapter_parameters, engine_plan
from agentrl.resolve.sizing.plan import Hardware, Plan, Workload, divide, make_plan, step_seconds
from agentrl.resolve.sizing.rates import Rates, keep_rates
from agentrl.resolve.sizing.search import ADAPTED, KEPT, SHARED, Remedy, memory_remedy, more_gpus, remedies
from agentrl.resolve.sizing.speed import CARDS, Range, card_named, decode_rate, learner_rate, pass_flops, step_flops

MODELS = Path(__file__).parents[4] / "docs" / "models"
SEVEN, LARGE = (find_shape(str(MODELS / f"qwen2.5-{size}.json")) for size in ("7b", "72b"))
WORK = Workload()


def on(gpus: int, shape: object = SEVEN, card: str = "h100", **settings: object) -> Plan:
    hardware = Hardware(gpus=gpus, gpu_bytes=CARDS[card].memory_gib * GIB, card=CARDS[card])
    config = divide(changed(TrainConfig(), **settings), shape, hardware)  # type: ignore[arg-type]
    return make_plan(config, shape, hardware, WORK)  # type: ignore[arg-type]


def test_each_kind_of_remedy_fits_and_adapters_come_last() -> None:
    found = remedies(on(8), WORK)
    assert {remedy.kind for remedy in found} == {KEPT, SHARED, ADAPTED}
    assert found[-1].kind == ADAPTED
    assert found[0].seconds <= found[1].seconds
    for remedy in found:
        assert remedy.plan.problems == []
        assert make_plan(changed(on(8).config, **remedy.values), SEVEN, on(8).hardware, WORK).problems == []
    shared = next(remedy.plan.config for remedy in found if remedy.kind == SHARED)
    assert shared.engine.num_engines * shared.engine.gpus_per_engine == shared.learner.num_learners == 8


def test_optimizers_are_moved_only_where_nothing_else_helps() -> None:
    assert "optimizer-offload" not in remedies(on(8), WORK)[0].flags
    (kept,) = (remedy for remedy in remedies(on(32, LARGE, gradient_checkpointing=True), WORK) if remedy.kind == KEPT)
    assert "--zero-stage 3" in kept.flags
    assert "--offload optimizer" in kept.flags


def test_a_wider_engine_comes_before_an_optimizer_in_cpu_memory() -> None:
    quick = Remedy(plan=on(8, offload=("optimizer",)), values={}, kind=KEPT, seconds=1.0, work_s=1.0)
    plan = on(8)
    wide = replace(quick, plan=replace(plan, config=changed(plan.config, tensor_parallel_size=2)), seconds=9.0)
    assert min(quick, wide, key=search._order) is wide


def test_an_adapter_in_4_bits_is_named_where_the_whole_one_is_too_large() -> None:
    small = find_shape(str(MODELS / "qwen2.5-3b.json"))
    (adapted,) = remedies(on(1, small, "4090", offload=("optimizer",), zero_stage=3, micro_batch_tokens=4096), WORK)[-1:]
    assert adapted.kind in (KEPT, ADAPTED)
    found = memory_remedy(replace(on(1, small, "4090"), hardware=Hardware(gpus=1, gpu_bytes=16 * GIB)), WORK)
    assert found is None
    tight = replace(on(1, small, "4090", gradient_checkpointing=True), hardware=Hardware(gpus=1, gpu_bytes=16 * GIB))
    (last,) = remedies(tight, WORK)
    assert last.values["load_in_4bit"] is True


def test_the_fewest_gpus_are_named() -> None:
    plan = on(1, LARGE)
    assert remedies(plan, WORK) == []
    larger = more_gpus(plan, WORK)
    assert larger is not None
    assert larger.plan.problems == []
    half = Hardware(gpus=larger.plan.hardware.gpus // 2, gpu_bytes=plan.hardware.gpu_bytes, card=CARDS["h100"])
    below = make_plan(divide(changed(plan.config, zero_stage=3), LARGE, half), LARGE, half, WORK)
    assert memory_remedy(below, WORK) is None


def test_cpu_memory_is_a_limit() -> None:
    plan = on(1, gradient_checkpointing=True)
    assert memory_remedy(plan, WORK) is not None
    poor = replace(plan, hardware=replace(plan.hardware, host_bytes=100 * GIB))
    assert memory_remedy(poor, WORK) is None
    offloaded = make_plan(changed(plan.config, offload=("optimizer",)), SEVEN, poor.hardware, WORK)
    assert [problem for problem in offloaded.problems if "CPU memory" in problem]


@pytest.mark.parametrize(
    ("given", "gpus", "division"),
    [
        ({"tensor_parallel_size": 4}, 16, (2, 8)),
        ({"num_engines": 6}, 8, (6, 2)),
        ({"num_learners": 6}, 8, (2, 6)),
        ({"colocate": True, "tensor_parallel_size": 4}, 8, (2, 8)),
        ({"colocate": True, "num_learners": 4, "tensor_parallel_size": 2}, 8, (2, 4)),
    ],
)
def test_what_is_given_of_the_division_is_kept(given: dict[str, object], gpus: int, division: tuple[int, int]) -> None:
    hardware = Hardware(gpus=gpus, gpu_bytes=80 * GIB)
    config = divide(changed(TrainConfig(), **given), SEVEN, hardware, given.keys())
    assert (config.engine.num_engines, config.learner.num_learners) == division


@pytest.mark.vllm
def test_ranks_follow_from_engines_that_share_their_gpus() -> None:
    flags = ["--agent", "envs/arithmetic.py", "--ray-address", "auto", "--colocate", "--tensor-parallel-size", "2", "--num-engines", "3"]
    assert load_config(flags).learner.num_learners == 6
    with pytest.raises(ConfigError, match="--num-learners 4"):
        load_config([*flags, "--num-learners", "4"])
    assert with_defaults(read_flags(TRAIN, ["--num-engines", "3"])).settings.learner.num_learners == 1


def test_speeds_of_data_sheets_give_ranges_and_measured_ones_count_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    assert card_named("H100") == CARDS["h100"]
    keep_rates("NVIDIA H100 80GB HBM3", Rates(matmul_bfloat16=7e14, memory=3e12, device_bytes=79 * GIB))
    measured = card_named("h100")
    assert (measured.tflops, measured.gb_per_s, measured.memory_gib, measured.measured) == (700, 3000, 79, True)
    assert learner_rate(measured)[0] == pytest.approx(0.3 * 7e14)
    assert learner_rate(CARDS["a100"]) == pytest.approx((0.2 * 312e12, 0.45 * 312e12))
    with pytest.raises(ConfigError, match="agentrl doctor"):
        card_named("rtx 6000")
    keep_rates("NVIDIA RTX 6000", Rates(matmul_bfloat16=1e14, memory=1e12))
    assert card_named("rtx 6000").tflops == 100


def test_decoding_reads_weights_and_cache_once_for_all_sequences() -> None:
    """Written out: 32 sequences of 512 and half of 1,024 tokens; 7.6e9 weights of 2 bytes; 28 layers of 4 heads of keys and values."""
    plan = on(8)
    read = 2 * SEVEN.parameters + 32 * 1024 * 28 * 2 * 4 * 128 * 2
    rate = 32 * 3.35e12 / read
    found = decode_rate(plan.config, SEVEN, plan.engine, CARDS["h100"], (512, 1024))
    assert found == pytest.approx((0.35 * rate, 0.75 * rate))
    experts = find_shape(str(MODELS / "qwen3-30b-a3b.json"))
    config = changed(plan.config, num_engines=4, groups_per_step=1, n_samples_per_prompt=4)
    single = engine_plan(config, experts, 80 * GIB)
    low, _ = decode_rate(config, experts, single, CARDS["h100"], (512, 1024))
    assert low > 0.35 * 3.35e12 / (0.25 * single.weights)  # of one sequence only the chosen experts are read
    weak = replace(CARDS["h100"], tflops=1.0)  # where the products of a step take longer than its reading
    assert decode_rate(plan.config, SEVEN, plan.engine, weak, (512, 1024))[1] == pytest.approx(0.75e12 / pass_flops(SEVEN, 1024))


def test_training_counts_passes_and_what_saving_memory_costs() -> None:
    config = changed(TrainConfig(), num_learners=4)
    flops = step_flops(config, SEVEN, 1536)
    assert step_flops(changed(config, gradient_checkpointing=True), SEVEN, 1536) == pytest.approx(flops * 4 / 3)
    assert step_flops(changed(config, lora_rank=16), SEVEN, 1536) == pytest.approx(flops * 2 / 3)
    seconds = {
        name: step_seconds(on(8, gradient_checkpointing=True, **values), WORK)["train"].low
        for name, values in {"plain": {}, "gathered": {"zero_stage": 3}, "moved": {"offload": ("optimizer",)}}.items()
    }
    assert seconds["plain"] < min(seconds["gathered"], seconds["moved"])
    assert adapter_parameters(SEVEN, 16) < SEVEN.parameters / 100
    turns = step_seconds(on(1, gradient_checkpointing=True), WORK)
    assert turns["turns"].low > 0
    assert turns["step"].low == pytest.approx(turns["train"].low + turns["generate"].low + turns["turns"].low)
    assert str(Range(1.0, 1.0)) == "1"
    assert str(Range(1.0, 2.5)) == "1 to 2.5"


def test_the_command_knows_gpus_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(MODELS / "qwen2.5-1.5b.json"), "--gpus", "1", "--gpu", "l40s"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "GiB of 45" in said
    assert " to " in next(line for line in said.splitlines() if line.startswith("seconds: "))
    assert main([*words, "--gpu-memory", "12"]) == 1
    assert main([*words[:-1], "voodoo"]) == 2
