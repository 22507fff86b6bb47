"""A short run from its settings to its directory, the table of methods, and the models of a run."""

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
from agentrl.track.summary import TuneSummary
from agentrl.tune import TuneResult, tune
from agentrl.tune.data import data_text
from agentrl.tune.follow import Stop
from agentrl.tune.learner_rows import RowMaker
from agentrl.tune.prepare import make_tokenizer, num_steps
from agentrl.tune.run import preview
from tests.learner_support import write_model
from tests.unit.learner.test_families import SHAPE, write
from tests.unit.tune.plans import state_of

DATA = Path(__file__).parents[3] / "examples" / "tune"
PAIRS = str(DATA / "pairs.jsonl")


def config(command: str = "dpo", data: str = PAIRS, **settings: Any) -> Any:
    return load_given(METHODS[command], {"data": data, **settings})


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
    assert {name: method.form for name, method in METHODS.items() if method.form not in ("dialogue", "pairs")} == {
        "kto": "labelled",
        "process-reward-model": "steps",
    }
    assert {"loss", "kl", "nll", "entropy"} == LOWER_IS_BETTER
    for method in METHODS.values():
        assert set(method.shown) <= {*method.metrics, "margin"}


def test_the_defaults_of_the_methods() -> None:
    own = {name: vars(method.config().method) for name, method in METHODS.items()}
    assert own["dpo"] == {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "reference": ""}
    assert own["kto"] == {"loss": "", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "reference": ""}
    assert own["orpo"] == {"loss": "", "beta": 0.1}
    assert own["distill"] == {"loss": "", "teacher": "", "beta": 0.5, "temperature": 1.0, "train_on": "answers"}
    assert own["sft"] == {"train_on": "answers", "packing": False, "loss": "nll"}
    assert own["reward-model"] == {"loss": "", "center_rewards_coefficient": 0.0}
    assert own["process-reward-model"] == {"loss": "", "step_separator": "\n", "last_step_only": False}
    optim = METHODS["dpo"].config().optim
    assert (optim.batch_size, optim.weight_decay, optim.adam_betas, optim.max_grad_norm) == (32, 0.0, (0.9, 0.95), 1.0)
    assert (optim.lr_schedule, optim.lr_warmup_steps, optim.zero_stage) == ("cosine", 0, 0)


def test_the_summary_of_the_rows_of_a_run(tmp_path: Path) -> None:
    summary = TuneSummary("dpo", METHODS["dpo"].shown)
    summary.add({"step": 0, "eval/loss": 0.7})
    for step in range(1, 5):
        summary.add({"step": step, "loss": 1.0 / step, "accuracy": 0.25 * step, "grad_norm": None})
    summary.add({"step": 5, "loss": 0.1, "accuracy": None, "eval/loss": 0.4, "eval/best": 0.4, "eval/best_step": 5.0})
    other = TuneSummary("dpo", ())
    for row in ({"step": 2, "loss": 1.0, "eval/loss": 0.6, "eval/best": 0.6, "eval/best_step": 2.0}, {"step": 9, "eval/loss": 0.9}):
        other.add(row)
    assert other.build(run_dir=tmp_path, wall_s=2.0, status="finished", data={})["eval"]["best"] == {"step": 2, "value": 0.6}
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
    read = [row["tokens"] for row in rows[1:]]
    assert read[0] < read[1] < read[2]
    assert read[2] > 2 * read[0]  # of all steps so far
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
    assert lines[0] == "5 steps of 8 rows, 8192 tokens at once on a rank, learning rate 0.0003"
    assert any(line.startswith("to evaluate on: 4 rows") for line in lines)
    assert sum(line.startswith("row ") for line in lines) == 3


def test_a_method_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="Methods: sft"):
        tune("ppo", data=PAIRS)


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", "AdamW"), ("muon", "MuonWithAdamW"), ("adafactor", "Adafactor")])
def test_a_run_has_the_optimizer_that_is_asked_for(optimizer: str, kind: str, tmp_path: Path) -> None:
    """A resumed run is compared in `tests/e2e/test_tune.py`."""
    given = config(optimizer=optimizer, weight_decay=0.1)
    state = state_of(given)
    state.models.policy.update(0.5)
    made = state.models.policy.optimizer
    assert type(made).__name__ == kind
    assert {group["lr"] for group in made.param_groups} == {0.5}
    assert {group["weight_decay"] for group in made.param_groups} == {0.1, 0.0}
    if optimizer == "muon":
        embeddings = state.policy.get_input_embeddings().weight
        assert [any(each is embeddings for each in group["params"]) for group in made.param_groups if group["hidden"]] == [False]


def test_a_process_reward_model_knows_its_separator_and_has_no_dropout() -> None:
    state = state_of(config("process-reward-model", str(DATA / "steps.jsonl"), step_separator=";"))
    assert state.policy.config.step_separator == ";"
    assert state.policy.config.get_text_config().pad_token_id == state.tokenizer.pad_token_id
    assert not any(module.training for module in state.policy.modules() if isinstance(module, torch.nn.Dropout))
    assert state.policy.num_labels == 2


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_rotary_positions_are_those_of_the_longest_rows(command: str, tmp_path: Path) -> None:
    """The loss of a row does not depend on longer rows beside it, and does on ``--max-length``."""
    data = {"sft": DATA / "chats.jsonl", "dpo": PAIRS}[command]
    path = write(tmp_path / "model", "Phi-3 LongRoPE")  # the frequencies change beyond 24 tokens
    short, long = (torch.arange(5, 5 + length).tolist() for length in (8, 40))
    figures = []
    for length in (24, 64):
        plan = config(command, str(data), model=path, max_length=length)
        rows = [{"input_ids": ids, "labels": ids} for ids in (short, long)]
        if command == "dpo":
            rows = [{"prompt_ids": ids[:4], "chosen_ids": ids[4:], "rejected_ids": ids[5:]} for ids in (short, long)]
        state, make = state_of(plan), RowMaker(command)
        alone, beside = (state.measure_rows(0, make(some)).logprobs for some in (rows[:1], rows))
        torch.testing.assert_close(beside[: len(alone)], alone, atol=1e-5, rtol=0)
        figures.append(alone)
    assert not torch.allclose(*figures, atol=1e-5)


def test_rows_beyond_positions_that_would_change_with_their_length_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"rope_parameters": rope})).save_pretrained(tmp_path)
    make_tokenizer(config().settings.model, "").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"dynamic RoPE .* beyond 256 tokens\. Use at most 256"):
        state_of(config("sft", str(DATA / "chats.jsonl"), model=str(tmp_path), max_length=257))


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    make_tokenizer(config().settings.model, "").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="cannot be trained"):
        state_of(config("orpo", model=str(tmp_path)))
    broken = write_model(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_text("none")
    with pytest.raises(ConfigError, match="cannot be trained"):
        state_of(config("orpo", model=broken))


def test_a_model_without_padding_gets_that_of_its_tokenizer(tmp_path: Path) -> None:
    state = state_of(config(model=write_model(tmp_path / "model"), reference=write_model(tmp_path / "other", seed=1)))
    assert state.policy.config.pad_token_id == state.policy.generation_config.pad_token_id == 0


def test_chats_follow_each_other_without_padding_and_pairs_share_their_prompts() -> None:
    for command, data in (("sft", "chats"), ("dpo", "pairs")):
        state = state_of(config(command, str(DATA / f"{data}.jsonl")))
        assert (state.models.kernel.name, state.models.kernel.packed) == (("varlen", True) if command == "sft" else ("sdpa", False))
        assert state.models.share_prompts
