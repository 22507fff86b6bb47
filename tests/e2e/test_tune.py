"""The commands of `agentrl.tune` train the bundled model on the data of ``examples/tune``, stop, are killed, and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.tune import TuneResult, tune
from agentrl.tune.directory import CHECKPOINTS, checkpoints_in
from tests.e2e.runs import ROOT, command

DATA = ROOT / "examples" / "tune"
pytestmark = pytest.mark.slow

METHODS = [
    # command, data, figure on held-out rows, its least improvement, settings
    ("sft", "chats", "token_accuracy", 0.1, {"num_epochs": 3.0}),
    ("reward-model", "helpful", "accuracy", 0.3, {"num_epochs": 2.0, "margin_key": "margin"}),
    ("process-reward-model", "steps", "accuracy", 0.3, {"num_epochs": 6.0}),
    ("dpo", "pairs", "accuracy", 0.7, {"num_epochs": 2.0}),
    ("kto", "labelled", "margin", 0.2, {"num_epochs": 3.0}),
    ("orpo", "pairs", "margin", 0.1, {"num_epochs": 2.0}),
    ("distill", "chats", "agreement", 0.05, {"num_epochs": 2.0}),
]

DATA_OF = [(method[0], method[1]) for method in METHODS]
ELSEWHERE = [(method, data) for method, data in DATA_OF if method not in ("sft", "dpo", "reward-model")]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model after a short supervised training."""
    data = str(DATA / "chats.jsonl")
    return tune("sft", data=data, run_dir=tmp_path_factory.mktemp("teacher") / "run", num_steps=12, tensorboard=False).model


def figures(result: TuneResult, name: str) -> tuple[float, float]:
    """A figure on held-out rows, before the first step and after the last one."""
    evaluated = result.summary["eval"]
    return evaluated["first"][name], evaluated["last"][name]


@pytest.mark.parametrize(("method", "data", "figure", "gain", "settings"), METHODS, ids=[method[0] for method in METHODS])
def test_a_method_improves_its_figure_on_held_out_rows(
    method: str, data: str, figure: str, gain: float, settings: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
):
    if method == "distill":
        settings = {**settings, "teacher": str(request.getfixturevalue("teacher"))}
    result = tune(method, data=str(DATA / f"{data}.jsonl"), eval_size=32, run_dir=tmp_path / "run", keep_best="loss", **settings)
    first, last = figures(result, figure)
    assert last > first + gain
    assert figures(result, "loss")[1] < figures(result, "loss")[0]
    assert result.status == "finished"
    assert {path.name for path in (result.model, result.run_dir / "best")} <= {path.name for path in result.run_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {path.name for path in result.model.iterdir()}
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(result.steps + 1))
    assert "[[" in (result.run_dir / "samples.txt").read_text()


def with_teacher(method: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """The teacher of a distillation; no setting for any other method."""
    return {"teacher": str(request.getfixturevalue("teacher"))} if method == "distill" else {}


def losses_of(result: TuneResult) -> list[float]:
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row.get("loss") is not None]


@pytest.mark.parametrize(("method", "data"), DATA_OF, ids=[method for method, _ in DATA_OF])
def test_an_adapter_is_trained_and_saved_alone(method: str, data: str, tmp_path: Path, request: pytest.FixtureRequest):
    rest: dict[str, Any] = {"num_steps": 12, "lora_rank": 8, "learning_rate": 5e-3, **with_teacher(method, request)}
    result = tune(method, data=str(DATA / f"{data}.jsonl"), run_dir=tmp_path / "run", **rest)
    losses = losses_of(result)
    assert sum(losses[-3:]) < sum(losses[:3])
    weights = load_file(result.model / "adapter_model.safetensors")
    assert any("lora_A" in name for name in weights)
    assert any("score" in name for name in weights) == (method in ("reward-model", "process-reward-model"))
    assert not (result.model / "model.safetensors").exists()


@pytest.mark.parametrize("adapter", [0, 8], ids=["whole", "adapter"])
@pytest.mark.parametrize(("method", "data"), ELSEWHERE, ids=[method for method, _ in ELSEWHERE])
def test_deepspeed_gives_the_losses_of_plain_training(method: str, data: str, adapter: int, tmp_path: Path, request: pytest.FixtureRequest):
    """One rank; `test_tune_ranks.py` has two, and the other methods."""
    rest: dict[str, Any] = {"num_steps": 4, "batch_size": 8, "lora_rank": adapter, "learning_rate": 1e-3, "tensorboard": False}
    rest |= {"data": str(DATA / f"{data}.jsonl"), **with_teacher(method, request)}
    plain, *sharded = (tune(method, zero_stage=stage, run_dir=tmp_path / f"zero-{stage}", **rest) for stage in (0, 2, 3))
    assert len(losses_of(plain)) == 4
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    expected = load_file(plain.model / file)
    for result in sharded:
        assert losses_of(result) == pytest.approx(losses_of(plain), abs=1e-3)
        found = load_file(result.model / file)
        assert expected.keys() <= found.keys()
        assert all(np.allclose(found[name], expected[name], atol=1e-3) for name in expected)


def test_packed_rows_do_not_see_each_other(tmp_path: Path):
    common: dict[str, Any] = {"data": str(DATA / "chats.jsonl"), "eval_size": 24, "num_steps": 1, "max_length": 64, "tensorboard": False}
    alone = tune("sft", run_dir=tmp_path / "alone", micro_batch_size=1, batch_size=4, **common)
    packed = tune("sft", run_dir=tmp_path / "packed", packing=True, micro_batch_size=1, batch_size=4, **common)
    counts = packed.summary["data"]["eval"]
    assert counts["rows"] == 24
    rows = {name: json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("alone", "packed")}
    assert rows["packed"]["eval/token_accuracy"] == pytest.approx(rows["alone"]["eval/token_accuracy"], abs=0.05)
    assert alone.summary["data"]["eval"]["trained"] == counts["trained"]


def test_text_and_conditional_training(tmp_path: Path):
    text = tune("sft", data=str(DATA / "texts.jsonl"), run_dir=tmp_path / "text", num_steps=6, max_length=24, overlong="split")
    assert text.summary["data"]["train"]["split"] > 0
    rated = tune("sft", data=str(DATA / "rated.jsonl"), run_dir=tmp_path / "rated", num_steps=2, quality_key="quality", eval_size=8)
    assert "<quality " in (rated.run_dir / "samples.txt").read_text()


def test_one_bad_line_among_ten_thousand_is_named_and_the_others_train(tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{number} + 1 =", "completion": str(number + 1)}) for number in range(10_000)]
    data.write_text("\n".join([*lines[:6172], '{"prompt": "6172 + 1 =", "completion": 61', *lines[6173:]]), encoding="utf-8")
    words = ["sft", "--data", str(data), "--num-steps", "2", "--batch-size", "8", "--eval-size", "0", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command(*words, "--bad-rows", "skip"), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "1 rows skipped" in said or "1 row skipped" in said
    assert "line 6173" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["data"]["train"]["examples"] == 9_999
    refused = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 2
    assert "line 6173" in refused.stderr


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(*words), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)


def wait_for_checkpoint(process: subprocess.Popen[bytes], run_dir: Path, after: int) -> int:
    """Wait until a complete checkpoint later than a step is there, and return its step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        complete = [path for path in checkpoints_in(run_dir / CHECKPOINTS) if (path / "manifest.json").exists()]
        if complete and (step := int(complete[-1].name.rpartition("-")[2])) > after:
            return step
        assert process.poll() is None, "the run ended early"
        time.sleep(0.02)
    raise AssertionError("no checkpoint in time")


def test_a_killed_and_a_stopped_run_end_with_the_weights_of_an_undisturbed_one(tmp_path: Path):
    words = ["dpo", "--data", str(DATA / "pairs.jsonl"), "--num-steps", "30", "--batch-size", "16", "--save-every", "1", "--seed", "3"]
    whole = tmp_path / "whole"
    assert start(*words, "--run-dir", str(whole)).wait(600) == 0
    broken = tmp_path / "broken"
    process = start(*words, "--run-dir", str(broken))
    killed = wait_for_checkpoint(process, broken, 1)
    process.kill()
    process.wait(60)
    process = start("dpo", "--resume", str(broken))
    wait_for_checkpoint(process, broken, killed + 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 130
    assert json.loads((broken / "summary.json").read_text())["status"] == "interrupted"
    assert start("dpo", "--resume", str(broken)).wait(600) == 0
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, broken)]
    assert [row["step"] for row in rows[1]] == list(range(31))  # 0: the rows held out, before the first step
    losses = [[(row["loss"], row.get("eval/loss")) for row in run] for run in rows]
    assert losses[0] == losses[1]
    weights = [load_file(run / "model" / "model.safetensors") for run in (whole, broken)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_a_resumed_run_refuses_other_data(tmp_path: Path):
    data = tmp_path / "pairs.jsonl"
    lines = (DATA / "pairs.jsonl").read_text().splitlines(keepends=True)[:64]
    data.write_text("".join(lines))
    tune("dpo", data=str(data), run_dir=tmp_path / "run", num_steps=2, save_every=1, batch_size=8)
    data.write_text("".join(lines[::-1]))
    with pytest.raises(ValueError, match="goes on with other rows"):
        tune("dpo", resume=str(tmp_path / "run"))


@pytest.mark.parametrize(("method", "data"), DATA_OF, ids=[method for method, _ in DATA_OF])
def test_a_run_that_goes_on_has_the_losses_of_an_undisturbed_one(method: str, data: str, tmp_path: Path, request: pytest.FixtureRequest):
    rest: dict[str, Any] = {"data": str(DATA / f"{data}.jsonl"), "batch_size": 8, "lr_schedule": "constant", "tensorboard": False}
    rest |= {"save_every": 2, "seed": 4, **with_teacher(method, request)}
    whole = tune(method, num_steps=5, run_dir=tmp_path / "whole", **rest)
    tune(method, num_steps=3, run_dir=tmp_path / "broken", **rest)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "checkpoint-3")  # as if it had been killed after the third step
    done = tune(method, num_steps=5, run_dir=tmp_path / "broken", resume="auto", **rest)
    assert len(losses_of(whole)) == 5
    assert losses_of(done) == losses_of(whole)
    weights = [load_file(result.model / "model.safetensors") for result in (whole, done)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw_8bit"])
def test_a_run_with_another_optimizer_learns_and_goes_on_bit_for_bit(optimizer: str, tmp_path: Path):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    rate = {"adafactor": 3e-2, "muon": 3e-3}.get(optimizer, 1e-3)
    rest: dict[str, Any] = {"data": str(DATA / "chats.jsonl"), "batch_size": 16, "lr_schedule": "constant", "tensorboard": False}
    rest |= {"save_every": 2, "seed": 4, "optimizer": optimizer, "learning_rate": rate, "weight_decay": 0.1}
    whole = tune("sft", num_steps=12, run_dir=tmp_path / "whole", **rest)
    tune("sft", num_steps=7, run_dir=tmp_path / "broken", **rest)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "checkpoint-7")
    done = tune("sft", num_steps=12, run_dir=tmp_path / "broken", resume="auto", **rest)
    losses = losses_of(whole)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert losses_of(done) == losses
    weights = [load_file(result.model / "model.safetensors") for result in (whole, done)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
