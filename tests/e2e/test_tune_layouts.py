"""Two ranks train `sft` and `dpo` as one does: with each layout, adapter, optimizer and kind of model."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch.multiprocessing as mp
from PIL import Image

from agentrl.assets import VISION_MODEL, located_model, tiny_model_path
from agentrl.track.jsonl import read_lines
from agentrl.tune import tune
from envs.shapes import COLOURS, make_tasks
from tests.e2e.runs import ROOT
from tests.learner_support import write_experts
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RANKS, ROWS, STEPS = 2, 8, 4
METHODS = ("sft", "dpo")
COMMON: dict[str, Any] = {"num_steps": STEPS, "batch_size": ROWS, "micro_batch_size": 2, "max_length": 96, "lr_schedule": "constant"}
COMMON |= {"learning_rate": 1e-3, "eval_size": 0, "record_rows": 4, "tensorboard": False, "token_cache": "none"}


@dataclass(frozen=True)
class Layout:
    """What two ranks do, and how close they are to one.

    Attributes:
        layout: Settings of the ranks, which one rank does not have.
        same: Settings that one rank has too.
        model: Model, a key of `models`.
        rounding: Largest difference of a loss.
    """

    layout: dict[str, Any]
    same: dict[str, Any] = field(default_factory=dict)
    model: str = "text"
    rounding: float = 2e-5


LORA: dict[str, Any] = {"lora_rank": 4, "learning_rate": 1e-2}
LAYOUTS = {
    "zero 0": Layout({"zero_stage": 0}),
    "zero 2": Layout({"zero_stage": 2}),
    "zero 3": Layout({"zero_stage": 3}),
    "rows in two parts": Layout({"zero_stage": 2, "sequence_parallel": 2}),
    "rows in two parts, zero 3": Layout({"zero_stage": 3, "sequence_parallel": 2}),
    "layers in two parts": Layout({"zero_stage": 0, "learner_tensor_parallel": 2}),
    "layers in two parts, zero 2": Layout({"zero_stage": 2, "learner_tensor_parallel": 2}),
    "lora": Layout({"zero_stage": 2}, LORA),
    "lora, zero 3": Layout({"zero_stage": 3}, LORA),
    "lora, rows in two parts": Layout({"zero_stage": 2, "sequence_parallel": 2}, LORA),
    "dora": Layout({"zero_stage": 2}, {**LORA, "lora_variant": ("dora",)}),
    # One scale for all numbers of a block, and blocks are divided among the ranks.
    "4 bits": Layout({"zero_stage": 2}, {**LORA, "load_in_4bit": True, "learning_rate": 3e-3}),
    "muon": Layout({"zero_stage": 0}, {"optimizer": "muon"}),
    "adafactor": Layout({"zero_stage": 0}, {"optimizer": "adafactor", "learning_rate": 1e-2}),
    "adamw in 8 bits": Layout({"zero_stage": 2}, {"optimizer": "adamw_8bit"}, rounding=2e-2),
    "experts": Layout({"zero_stage": 2}, model="experts"),
    "experts, zero 3": Layout({"zero_stage": 3}, model="experts"),
    "experts, rows in two parts": Layout({"zero_stage": 2, "sequence_parallel": 2}, model="experts"),
    "images": Layout({"zero_stage": 2}, model="images"),
    "images, zero 3": Layout({"zero_stage": 3}, model="images"),
}
QUANTISED = ("4 bits", "adamw in 8 bits")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bundled models, and a random mixture of experts with the tokens of the first."""
    experts = Path(write_experts(tmp_path_factory.mktemp("experts"), vocab_size=512, num_attention_heads=4, num_key_value_heads=2))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model_path() / file).exists():
            shutil.copy(tiny_model_path() / file, experts)
    return {"text": str(tiny_model_path()), "experts": str(experts), "images": located_model(VISION_MODEL)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    """A few rows for each method, with and without images: every step has all of them."""
    folder, rng = tmp_path_factory.mktemp("data"), Random(3)
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for method, name in zip(METHODS, ("chats", "pairs"), strict=True):
        found[method, False] = list(map(json.loads, (ROOT / f"examples/tune/{name}.jsonl").read_text().splitlines()[:ROWS]))
    seen = [task for task in make_tasks(5, 10 * ROWS) if task.label in COLOURS][:ROWS]
    for number, task in enumerate(seen):
        Image.fromarray(np.asarray(task.images[0])).save(folder / f"{number}.png", "PNG")
        row = {"prompt": task.prompt, "images": [str(folder / f"{number}.png")]}
        found.setdefault(("sft", True), []).append({**row, "completion": task.label})
        other = rng.choice([name for name in COLOURS if name != task.label])
        found.setdefault(("dpo", True), []).append({**row, "chosen": task.label, "rejected": other})
    for (method, images), rows in found.items():
        (folder / f"{method}-{images}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {case: str(folder / f"{case[0]}-{case[1]}.jsonl") for case in found}


def settings_of(name: str, method: str, models: dict[str, str], data: dict[tuple[str, bool], str]) -> dict[str, Any]:
    """Settings that one rank has too."""
    layout = LAYOUTS[name]
    return {**COMMON, **layout.same, "model": models[layout.model], "data": data[method, layout.model == "images"]}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, models: Any, data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two ranks in each layout that is asked for, in processes that live for all of them."""
    out = tmp_path_factory.mktemp("ranks")
    asked = [item.callspec.params for item in request.session.items if "layout" in getattr(getattr(item, "callspec", None), "params", {})]
    installed = importlib.util.find_spec("bitsandbytes") is not None
    runs = [(each["layout"], each["method"]) for each in asked if installed or each["layout"] not in QUANTISED]
    cases = [(f"{name}, {method}", method, {**settings_of(name, method, models, data), **LAYOUTS[name].layout}) for name, method in runs]
    mp.spawn(on_a_rank, args=(free_ports(len(cases)), cases, out), nprocs=RANKS)
    return out


def on_a_rank(rank: int, ports: list[int], cases: list[tuple[str, str, dict[str, Any]]], out: Path) -> None:
    """Train as torchrun would let one rank do; an error is written down."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    for (name, method, settings), port in zip(cases, ports, strict=True):
        os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            tune(method, run_dir=out / name, **settings)
        except Exception:
            (out / f"{name}.txt").write_text(traceback.format_exc())


def steps_of(run: Path) -> list[dict[str, float]]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row.get("loss") is not None]


def recorded(run: Path) -> list[float]:
    """Losses of single rows, before the first step and after the last."""
    losses = [line["loss"] for line in read_lines(run / "rows.jsonl") if line.get("loss") is not None]
    assert len(losses) == 8
    return losses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one_does(layout: str, method: str, trained: Path, models: Any, data: Any, tmp_path: Path) -> None:
    if layout in QUANTISED:
        pytest.importorskip("bitsandbytes")
    name = f"{layout}, {method}"
    failed = trained / f"{name}.txt"
    assert not failed.exists(), failed.read_text()
    found = steps_of(trained / name)
    expected = steps_of(tune(method, run_dir=tmp_path / "alone", **settings_of(layout, method, models, data)).run_dir)
    rounding = LAYOUTS[layout].rounding
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], abs=rounding)
    assert recorded(trained / name) == pytest.approx(recorded(tmp_path / "alone"), abs=20 * rounding)
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-4)
    assert len(found) == STEPS
    assert found[-1]["loss"] < found[0]["loss"] - 10 * rounding
    names = {path.name for path in (trained / name / "model").iterdir()}
    assert ("adapter_model.safetensors" if "lora_rank" in LAYOUTS[layout].same else "model.safetensors") in names
