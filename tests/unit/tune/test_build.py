"""Arguments, models and adapters that a run is built of, and a short run from its settings to its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.config.methods import LOWER_IS_BETTER, METHODS
from agentrl.config.tune import TuneRunConfig
from agentrl.core.errors import ConfigError
from agentrl.resolve.tune import load_given
from agentrl.tune import TuneResult, build, tune
from agentrl.tune.follow import Stop
from agentrl.tune.prepare import make_tokenizer, num_steps
from agentrl.tune.run import preview
from agentrl.tune.summary import TuneSummary, data_text
from tests.unit.learner.test_families import SHAPE, write

DATA = Path(__file__).parents[3] / "examples" / "tune"
PAIRS = str(DATA / "pairs.jsonl")


def config(command: str = "dpo", data: str = PAIRS, **settings: Any) -> Any:
    return load_given(METHODS[command], {"data": data, **settings})


def test_arguments_follow_from_the_settings() -> None:
    settings = {"batch_size": 24, "micro_batch_size": 3, "num_ranks": 2, "lr_warmup_steps": 5, "max_grad_norm": 0.5, "seed": 3}
    found = build.arguments(config(**settings, lr_schedule="constant", adam_betas=(0.9, 0.8)), Path("run"), 7, evaluate_first=True)
    expected = {
        "output_dir": "run/checkpoints",
        "max_steps": 7,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.8,
        "max_grad_norm": 0.5,
        "seed": 3,
        "eval_on_start": True,
        "train_sampling_strategy": "sequential",
        "ddp_backend": "gloo",
    }
    assert {name: found[name] for name in expected} == expected
    assert "deepspeed" not in found
    assert "ddp_backend" not in build.arguments(config(), Path("run"), 7, evaluate_first=False)


def test_recomputed_layers_of_an_adapter_are_reentrant_under_zero_3() -> None:
    changes: dict[str, Any] = {"gradient_checkpointing": True, "zero_stage": 3, "lora_rank": 2}
    found = build.arguments(config(**changes), Path("run"), 1, evaluate_first=False)
    assert found["gradient_checkpointing_kwargs"] == {"use_reentrant": True}
    assert found["deepspeed"]["zero_optimization"]["stage"] == 3
    assert found["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    for name, other in (("gradient_checkpointing", False), ("zero_stage", 2), ("lora_rank", 0)):
        found = build.arguments(config(**{**changes, name: other}), Path("run"), 1, evaluate_first=False)
        assert "gradient_checkpointing_kwargs" not in found


def test_an_adapter_is_that_of_the_settings() -> None:
    lora: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 12.0, "lora_dropout": 0.25}
    found = build.adapter(METHODS["reward-model"], config("reward-model", str(DATA / "helpful.jsonl"), **lora).settings.lora)
    assert (found.r, found.lora_alpha, found.lora_dropout) == (4, 12.0, 0.25)
    assert (found.target_modules, found.task_type, found.modules_to_save) == ("all-linear", "SEQ_CLS", ["score"])
    named = build.adapter(METHODS["dpo"], config(**lora, lora_target_modules="q_proj,v_proj").settings.lora)
    assert (named.target_modules, named.modules_to_save) == ({"q_proj", "v_proj"}, None)


class Loaded(torch.nn.Module):
    """A model in the place of one that is read from disk."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, torch.nn.Parameter(torch.zeros(1))
        self.config: dict[str, Any] = {}


def test_the_frozen_model_is_the_teacher_the_reference_or_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "language_model", lambda name, **_: type("Kind", (), {"from_pretrained": lambda name, **_: Loaded(name)}))
    args: Any = type("Arguments", (), {"bf16": False, "device": "cpu"})
    found = build._frozen_model(config(reference="other"), args)
    assert (found.name, found.training, found.weight.requires_grad) == ("other", False, False)
    assert build._frozen_model(config(model="mine"), args).name == "mine"
    assert build._frozen_model(config("distill", str(DATA / "chats.jsonl"), teacher="wise"), args).name == "wise"
    assert build._frozen_model(config(lora_rank=2), args) is None
    assert build._frozen_model(config("orpo"), args) is None


def test_a_model_to_compare_answers_with_has_no_dropout_and_its_padding() -> None:
    settings = config("process-reward-model", str(DATA / "steps.jsonl"), step_separator=";")
    found = build._trained_model(settings, 7)
    assert found.config.step_separator == ";"
    assert found.config.get_text_config().pad_token_id == 7
    assert not any(module.training for module in found.train().modules() if isinstance(module, torch.nn.Dropout))
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    assert found.num_labels == 2


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_rotary_positions_do_not_depend_on_the_rows_beside(command: str, tmp_path: Path) -> None:
    data = {"sft": DATA / "chats.jsonl", "dpo": PAIRS}[command]
    path = write(tmp_path / "model", "Phi-3 LongRoPE")  # the frequencies change beyond 24 tokens
    args: Any = type("Arguments", (), {"bf16": False, "device": "cpu"})
    found = []
    for length in (24, 64):
        settings = config(command, str(data), model=path, max_length=length)
        models = [build._trained_model(settings, 0)]
        models += [build._frozen_model(settings, args)] if command == "dpo" else []
        for model in models:
            alone, beside = torch.arange(5, 13)[None], torch.arange(5, 45)[None]
            padded = torch.cat([torch.nn.functional.pad(alone, (0, 32)), beside])
            mask = (torch.arange(40)[None] < torch.tensor([[8], [40]])).long()
            with torch.no_grad():
                one, other = model.eval()(alone).logits[0], model(padded, attention_mask=mask).logits[0, :8]
            assert torch.allclose(one, other, atol=1e-5)
        found.append(one)
    assert not torch.allclose(*found, atol=1e-5)


def test_rows_beyond_positions_that_would_change_with_their_length_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"rope_parameters": rope})).save_pretrained(tmp_path)
    settings = config("sft", str(DATA / "chats.jsonl"), model=str(tmp_path), max_length=257)
    with pytest.raises(ConfigError, match=r"--max-length = 257.*dynamic RoPE .* beyond 256 tokens\. Use at most 256"):
        build._trained_model(settings, 0)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    given = build.arguments(config(), tmp_path, 1, evaluate_first=False)
    with pytest.raises(ConfigError, match="cannot be trained"):
        build.build_trainer(config("orpo", model=str(tmp_path)), given, type("T", (), {"pad_token": "x", "pad_token_id": 0}), [], None)


def test_the_length_of_a_run() -> None:
    assert num_steps(TuneRunConfig(num_epochs=1.5), 8, 20) == 3
    assert num_steps(TuneRunConfig(num_steps=11), 8, 20) == 11
    with pytest.raises(ConfigError, match="is more than the 7 rows"):
        num_steps(TuneRunConfig(), 8, 7)


def test_the_directory_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with config(run_dir="a").in_directory() as placed:
        assert placed.run_dir == placed.settings.run.run_dir == tmp_path / "a"
    plan = config()
    with plan.in_directory() as first, plan.in_directory() as second:
        new = first.run_dir
        assert second.run_dir == new.with_name(f"{new.name}-2")
    assert new.parent == tmp_path / "runs"
    assert new.name.startswith("dpo-")


def test_a_resumed_run_stays_where_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text(config(run_dir="old").to_json())
    with load_given(METHODS["dpo"], {"resume": tmp_path / "elsewhere"}).in_directory() as moved:
        assert moved.run_dir == tmp_path / "elsewhere"


def test_the_table_of_methods() -> None:
    rates = {name: method.learning_rates for name, method in METHODS.items()}
    assert rates["dpo"] == rates["kto"] == (3e-4, 2e-6, 5e-7)
    assert rates["sft"] == rates["distill"] == (1e-3, 5e-5, 1e-5)
    assert rates["reward-model"] == rates["process-reward-model"] == (5e-4, 2e-5, 1e-5)
    assert rates["orpo"] == (5e-4, 2e-5, 8e-6)
    assert {name for name, method in METHODS.items() if not method.without_dropout} == {"sft", "distill"}
    assert {name: method.form for name, method in METHODS.items() if method.form not in ("dialogue", "pairs")} == {
        "kto": "labelled",
        "process-reward-model": "steps",
    }
    assert {name: method.head for name, method in METHODS.items() if method.head} == {
        "reward-model": ("score",),
        "process-reward-model": ("score",),
    }
    assert {"loss", "kl", "nll", "entropy"} == LOWER_IS_BETTER
    for method in METHODS.values():
        assert set(method.shown) <= {*method.metrics, "margin"}


def test_the_defaults_of_the_methods() -> None:
    own = {name: vars(method.config().method) for name, method in METHODS.items()}
    assert own["dpo"] == {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "reference": ""}
    assert own["kto"] == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "reference": ""}
    assert own["orpo"] == {"beta": 0.1}
    assert own["distill"] == {"teacher": "", "beta": 0.5, "temperature": 1.0, "train_on": "answers"}
    assert own["sft"] == {"train_on": "answers", "packing": False, "loss": "nll"}
    assert own["reward-model"] == {"center_rewards_coefficient": 0.0}
    assert own["process-reward-model"] == {"step_separator": "\n", "last_step_only": False}
    optim = METHODS["dpo"].config().optim
    assert (optim.batch_size, optim.weight_decay, optim.adam_betas, optim.max_grad_norm) == (32, 0.0, (0.9, 0.95), 1.0)
    assert (optim.lr_schedule, optim.lr_warmup_steps, optim.zero_stage) == ("cosine", 0, 0)


def test_the_summary_of_the_rows_of_a_run(tmp_path: Path) -> None:
    summary = TuneSummary(METHODS["dpo"])
    summary.add({"step": 0, "eval/loss": 0.7})
    for step in range(1, 5):
        summary.add({"step": step, "loss": 1.0 / step, "accuracy": 0.25 * step, "grad_norm": None})
    summary.add({"step": 5, "loss": 0.1, "accuracy": None, "eval/loss": 0.4, "eval/best": 0.4, "eval/best_step": 5.0})
    found = summary.build(run_dir=tmp_path, wall_s=2.0, status="finished", data={})
    assert (found["steps"], found["command"], found["train"].keys()) == (5, "dpo", {"loss", "accuracy"})
    assert found["eval"] == {
        "first": {"step": 0, "loss": 0.7},
        "last": {"step": 5, "loss": 0.4, "best": 0.4, "best_step": 5.0},
        "best": {"step": 5, "value": 0.4},
    }
    assert summary.latest["step"] == 5
    assert "accuracy" not in summary.latest
    counts = {"dropped": 2, "cut": 0, "split": 0, "tokens": 1500, "trained": 500, "longest": 60, "rows": 9}
    assert data_text(counts, 64) == "9 rows with 1.5k tokens, 500 of them trained, the longest row 60; above --max-length 64: 2 dropped"


SETTINGS: dict[str, Any] = {"data": PAIRS, "batch_size": 4, "max_length": 128, "tensorboard": False, "eval_size": 4, "keep_best": "loss"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    return tune("dpo", run_dir=tmp_path_factory.mktemp("run") / "dpo", num_steps=3, save_every=1, eval_every=2, **SETTINGS)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_rows_checkpoints_and_models(finished: TuneResult) -> None:
    rows = rows_of(finished.run_dir)
    assert (finished.status, finished.steps, [row["step"] for row in rows]) == ("finished", 3, [0, 1, 2, 3])
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 3]
    assert rows[1]["accuracy"] == 0.0  # policy and reference are the same: no answer is preferred
    assert rows[1]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert sorted(path.name for path in (finished.run_dir / "checkpoints").iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert (finished.model / "model.safetensors").is_file()
    assert not (finished.model / "training_args.bin").exists()
    assert (finished.run_dir / "best" / "model.safetensors").is_file()
    assert (finished.run_dir / "samples.txt").read_text().count("chosen") == 3
    assert finished.summary["data"]["eval"]["rows"] == 4
    saved = json.loads((finished.run_dir / "config.json").read_text())
    assert saved["optim"]["learning_rate"] == 3e-4
    assert "resume" not in saved["run"] or not saved["run"]["resume"]


def test_a_run_that_is_stopped_is_interrupted_and_goes_on(finished: TuneResult, tmp_path: Path) -> None:
    stop = Stop()
    stop.asked = True
    first = tune("dpo", run_dir=tmp_path / "run", num_steps=3, stop=stop, **{**SETTINGS, "eval_size": 4})
    assert (first.status, first.steps) == ("interrupted", 1)
    assert not first.model.exists()
    again = tune("dpo", resume=str(tmp_path / "run"))
    assert (again.status, again.steps) == ("finished", 3)
    assert [row["loss"] for row in rows_of(again.run_dir) if "loss" in row] == pytest.approx(
        [row["loss"] for row in rows_of(finished.run_dir) if "loss" in row], abs=1e-6
    )


def test_a_preview_says_how_long_the_run_is_and_shows_rows() -> None:
    lines = preview(config(batch_size=8, num_steps=5, eval_size=4))
    assert lines[0] == "5 steps of 8 rows, learning rate 0.0003"
    assert any(line.startswith("to evaluate on: 4 rows") for line in lines)
    assert sum(line.startswith("row ") for line in lines) == 3


def test_a_method_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="Methods: sft"):
        tune("ppo", data=PAIRS)


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", "AdamW"), ("muon", "MuonWithAdamW"), ("adafactor", "Adafactor")])
def test_a_run_has_the_optimizer_that_is_asked_for(optimizer: str, kind: str, tmp_path: Path) -> None:
    """A resumed run is compared in `tests/e2e/test_tune.py`."""
    given = config(optimizer=optimizer, weight_decay=0.1)
    arguments = build.arguments(given, tmp_path, 1, evaluate_first=False)
    trainer = build.build_trainer(given, arguments, make_tokenizer(given.settings.model, ""), [], None)
    made = trainer.create_optimizer()
    assert type(made).__name__ == kind
    assert {group["lr"] for group in made.param_groups} == {given.settings.optim.learning_rate}
    assert {group["weight_decay"] for group in made.param_groups} == {0.1, 0.0}
    assert trainer.create_optimizer() is made
    if optimizer == "muon":
        embeddings = trainer.model.get_input_embeddings().weight
        assert [any(each is embeddings for each in group["params"]) for group in made.param_groups if group["hidden"]] == [False]
