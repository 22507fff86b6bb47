from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.tune import main
from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.resolve.tune import load, load_given

DATA = "examples/tune/pairs.jsonl"
DPO, SFT = METHODS["dpo"], METHODS["sft"]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_names_of_settings_are_unique_over_sections(method: Any):
    config = method.config()
    names = [item.name for section in dataclasses.fields(config) for item in dataclasses.fields(getattr(config, section.name))]
    assert len(names) == len(set(names))


def test_defaults_then_file_then_flags(tmp_path: Path):
    path = tmp_path / "dpo.toml"
    path.write_text(f'data = "{DATA}"\nbeta = 0.2\n\n[optim]\nbatch_size = 8\n', encoding="utf-8")
    config: Any = load(DPO, ["--config", str(path), "--beta", "0.3"]).settings
    assert (config.method.beta, config.optim.batch_size, config.method.loss) == (0.3, 8, "sigmoid")


def test_names_of_other_systems_are_known():
    words = ["--pretrain", "", "--dataset", DATA, "--train_batch_size=8", "--max-epochs", "2", "--loss-type", "hinge"]
    config: Any = load(DPO, words).settings
    assert (config.data.data, config.optim.batch_size, config.run.num_epochs, config.method.loss) == (DATA, 8, 2.0, "hinge")


def test_the_learning_rate_follows_from_method_and_model():
    assert load(DPO, ["--data", DATA]).settings.optim.learning_rate == 3e-4
    assert load(DPO, ["--data", DATA, "--model", "someone/large"]).settings.optim.learning_rate == 5e-7
    assert load(DPO, ["--data", DATA, "--model", "someone/large", "--lora-rank", "8"]).settings.optim.learning_rate == 5e-6
    assert load(DPO, ["--data", DATA, "--learning-rate", "1e-5"]).settings.optim.learning_rate == 1e-5


TWO = ["--num-ranks", "2"]
WRONG = [
    (["--data", DATA, "--betta", "1"], "did you mean --beta"),
    ([], "--data = '': is required"),
    (["--data", "none.jsonl"], "no such file"),
    (["--data", DATA, "--beta", "0"], "--beta = 0"),
    (["--data", DATA, "--label-smoothing", "0.1"], "has no effect with --loss sigmoid. Use --loss cdpo"),
    (["--data", DATA, "--loss", "cdpo"], "needs --label-smoothing above 0"),
    (["--data", DATA, "--loss", "robust"], "needs --label-smoothing above 0"),
    (["--data", DATA, "--lora-alpha", "8"], "has no effect without an adapter"),
    (["--data", DATA, "--eval-size", "0", "--eval-every", "5"], "has no rows to evaluate on"),
    (["--data", DATA, "--eval-size", "0", "--keep-best", "loss"], "there are none"),
    (["--data", DATA, "--early-stopping", "2"], "Add --eval-every N"),
    (["--data", DATA, "--eval-size", "4", "--keep-best", "bleu"], "is no figure of this method"),
    (["--data", DATA, "--overlong", "split"], "is for plain text"),
    (["--data", DATA, "--data-probs", "1,2"], "has 2 numbers for 1 data set"),
    (["--data", DATA, "--input-template", "x"], "must hold {} exactly once"),
    (["--data", DATA, "--reference", "m", "--lora-rank", "4"], "Leave one of the two out"),
    (["--data", DATA, "--resume", "auto"], "Give --run-dir"),
    (["--data", DATA, "--resume", "nowhere"], "holds no run"),
    (["--data", DATA, "--sequence-parallel", "2"], "--sequence-parallel = 2: does not divide --num-learners 1"),
    (["--data", DATA, *TWO, "--sequence-parallel", "2", "--attn-implementation", "sdpa"], "needs packed rows, and sdpa pads them"),
    (["--data", DATA, *TWO, "--learner-tensor-parallel", "2", "--lora-rank", "4"], "does not go with --lora-rank"),
    (["--data", DATA, *TWO, "--learner-tensor-parallel", "2", "--ema-decay", "0.9"], "does not go with --ema-decay"),
    (["--data", DATA, "--offload", "optimizer"], "--offload = 'optimizer': needs a GPU"),
    (["--data", DATA, "--attn-implementation", "flash_attention_2"], "needs a GPU, and this machine has none"),
    (["--data", DATA, "--tiled-mlp", "--lora-rank", "4"], "--tiled-mlp = True: does not go with --lora-rank"),
    (["--data", DATA, "--compile-layers", "--zero-stage", "3"], "--compile-layers = True: cannot compile layers"),
    (["--data", DATA, "--optimizer", "muon", "--zero-stage", "2"], "--zero-stage = 2: gives optimizers flattened parts"),
    (["--data", DATA, "--optimizer", "muon", "--dtype", "bfloat16"], "--learner-dtype = 'bfloat16': has float32 master weights"),
]


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        (["--ema-decay", "0.9"], "torch"),
        (["--lora-rank", "4", "--optimizer", "muon", "--compile-layers"], "torch"),
        (["--zero-stage", "1"], "deepspeed"),
        (["--num-learners", "2"], "deepspeed"),
        (["--dtype", "bfloat16"], "deepspeed"),
        (["--tiled-mlp"], "deepspeed"),
    ],
)
def test_pytorch_alone_trains_where_it_does_all_that_is_asked_for(words: list[str], backend: str):
    assert load(DPO, ["--data", DATA, *words]).learner.learner_backend == backend


def test_settings_of_the_learner_are_those_of_the_command():
    words = ["--num-ranks", "2", "--sequence-parallel", "2", "--micro-batch-size", "3", "--max-length", "50", "--min-lr-ratio", "0.1"]
    learner = load(DPO, ["--data", DATA, *words, "--learning-rate", "0.2", "--no-share-prompts"]).learner
    assert (learner.num_learners, learner.sequence_parallel, learner.learner_tensor_parallel) == (2, 2, 1)
    assert (learner.micro_batch_tokens, learner.min_lr_ratio, learner.learning_rate, learner.share_prompts) == (150, 0.1, 0.2, False)


def test_what_a_reference_or_a_teacher_is_moved_out_of_needs_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.resolve.tune.cuda_device_count", lambda: 1)
    words = ["--data", DATA, "--offload", "reference"]
    learner = load(DPO, words).learner
    assert (learner.offload, learner.learner_backend, learner.dtype("cuda")) == (("reference",), "deepspeed", "bfloat16")
    assert load(METHODS["distill"], [*words, "--teacher", "wise"]).learner.offload == ("reference",)
    for method, more in ((SFT, []), (DPO, ["--lora-rank", "4"]), (METHODS["reward-model"], [])):
        with pytest.raises(ConfigError, match="--offload = 'reference'"):
            load(method, [*words, *more])


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words[2:]) or str(words) for words, _ in WRONG])
def test_what_is_wrong_is_named_with_its_remedy(words: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        load(DPO, words)
    assert message in str(caught.value)


def test_early_stopping_goes_by_the_loss_unless_a_figure_is_named():
    words = ["--data", DATA, "--eval-every", "5", "--patience", "3"]
    assert load(DPO, words).settings.eval.keep_best == "loss"
    assert load(DPO, [*words, "--keep-best", "accuracy"]).settings.eval.keep_best == "accuracy"
    assert load(DPO, ["--data", DATA]).settings.eval.keep_best == ""


def test_rules_of_single_methods():
    with pytest.raises(ConfigError, match="at least 2"):
        load(METHODS["kto"], ["--data", DATA, "--batch-size", "1"])
    with pytest.raises(ConfigError, match="--teacher = '': is required"):
        load(METHODS["distill"], ["--data", DATA])
    with pytest.raises(ConfigError, match=r"\{prompt\} and \{quality\}"):
        load(SFT, ["--data", DATA, "--quality-key", "q", "--quality-template", "{prompt}"])
    with pytest.raises(UnknownFlagError):
        load(SFT, ["--data", DATA, "--chosen-key", "a"])


def test_an_adapter_is_no_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="Merge it first"):
        load(DPO, ["--data", DATA, "--model", str(tmp_path)])


def test_settings_given_in_python():
    config: Any = load_given(DPO, {"data": DATA, "run_dir": Path("runs/x"), "beta": 0.5}).settings
    assert (config.run.run_dir, config.method.beta) == (Path.cwd() / "runs/x", 0.5)
    with pytest.raises(ConfigError, match="--push-to-hub  TRL; not here: push the folder RUN_DIR/model"):
        load_given(DPO, {"data": DATA, "push_to_hub": "me/model"})
    with pytest.raises(ConfigError, match="Did you mean `beta`"):
        load_given(DPO, {"data": DATA, "betas": 0.5})


@pytest.mark.parametrize(
    ("hidden", "device", "given", "expected"),
    [
        (64, "cpu", {}, 8192),
        (1024, "cpu", {}, 1024),
        (1024, "cuda", {}, 8192),
        (1024, "cpu", {"micro_batch_tokens": 300}, 300),
        (1024, "cpu", {"micro_batch_size": 3, "max_length": 50}, 150),
    ],
)
def test_tokens_of_a_micro_batch_follow_from_model_and_device(
    hidden: int, device: str, given: dict[str, int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shape = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 12, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_attention_heads": 8, "max_position_embeddings": 512}))
    monkeypatch.setattr("agentrl.resolve.tune.cuda_device_count", lambda: int(device == "cuda"))
    plan = load_given(DPO, {"data": DATA, "model": str(tmp_path), **given})
    assert (plan.learner.micro_batch_tokens, plan.ranks.device) == (expected, device)


def test_earlier_words_are_taken_and_what_they_mean_now_is_said():
    plan = load(METHODS["sft"], ["--data", DATA, "--micro-train-batch-size", "2", "--max-len", "60", "--packing"])
    assert plan.learner.micro_batch_tokens == 120
    meaning = "--micro-batch-size 2 is --micro-batch-tokens 120 now: so many times --max-length"
    assert plan.notes == (meaning, "--packing is unnecessary: rows always follow each other without padding where the model allows it")
    assert load(METHODS["sft"], ["--data", DATA, "--micro-batch-tokens", "120"]).notes == ()
    with pytest.raises(ConfigError, match=r"--micro-batch-size = 2: is the earlier form of --micro-batch-tokens"):
        load_given(DPO, {"data": DATA, "micro_batch_size": 2, "micro_batch_tokens": 120})


def test_a_resumed_run_may_not_learn_otherwise(tmp_path: Path):
    def again(schedule: str, **changes: Any) -> str:
        plan = load_given(DPO, {"data": DATA, "lr_schedule": schedule, "run_dir": tmp_path, "resume": "auto", **changes})
        with plan.in_directory():
            return plan.to_json()

    (tmp_path / "config.json").write_text(again("constant"))
    again("constant", num_steps=50, save_every=3)
    with pytest.raises(ConfigError, match=r"--beta \(was 0.1, now 0.4\)"):
        again("constant", beta=0.4)
    (tmp_path / "config.json").write_text(again("constant").replace('"constant"', '"cosine"'))
    with pytest.raises(ConfigError, match="--num-steps"):
        again("cosine", num_steps=50)


def test_a_plan_says_where_settings_come_from(tmp_path: Path):
    (tmp_path / "dpo.toml").write_text(f'data = "{DATA}"\n')
    plan = load(DPO, ["--config", str(tmp_path / "dpo.toml"), "--beta", "0.3", "--eval-every", "5", "--patience", "2"])
    decided = {"learning_rate": "model", "keep_best": "settings"}
    assert plan.sources == {"data": "file", "beta": "flag", "eval_every": "flag", "early_stopping": "flag"} | decided
    assert json.loads(plan.to_json())["sources"] == plan.sources
    (tmp_path / "config.json").write_text(plan.to_json())
    assert load_given(DPO, {"resume": tmp_path}).sources == {**plan.sources, "resume": "python"}
    assert load_given(DPO, {"resume": tmp_path}).to_json() == plan.to_json().replace(str(plan.run_dir), str(tmp_path))


RUNS = [("sft", "chats"), ("dpo", "pairs"), ("reward-model", "helpful")]


@pytest.mark.parametrize(("command", "rows"), RUNS)
def test_a_dry_run_prints_what_the_run_writes(command: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--data", f"examples/tune/{rows}.jsonl", "--run-dir", str(tmp_path / "run"), "--num-steps", "1", "--batch-size", "4"]
    assert main(command, [*words, "--record-rows", "0", "--no-tensorboard", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert main(command, [*words, "--record-rows", "0", "--no-tensorboard"]) == 0
    assert (tmp_path / "run" / "config.json").read_text() == printed
    assert {"data": "flag", "learning_rate": "model"}.items() <= json.loads(printed)["sources"].items()
