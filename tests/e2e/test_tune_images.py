"""Preferences between answers to drawn pictures, trained by the commands on the bundled model that reads images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from agentrl.assets import VISION_MODEL, located_model
from agentrl.learner.merge import merge_into_base
from agentrl.tune import tune
from envs.shapes import COLOURS, make_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
METHODS = [
    # command, epochs, figure on held-out rows that has to pass a bound after training
    ("dpo", 4.0, "accuracy", 0.65),
    ("kto", 4.0, "margin", 0.1),
    ("orpo", 4.0, "accuracy", 0.8),
    ("reward-model", 12.0, "accuracy", 0.7),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions for colours: the answer that is in the picture against another one."""
    folder, rng = tmp_path_factory.mktemp("pairs"), Random(3)
    rows = []
    for number, task in enumerate(task for task in make_tasks(5, 700) if task.label in COLOURS):
        Image.fromarray(np.asarray(task.images[0])).save(folder / f"{number}.png", "PNG")
        other = rng.choice([name for name in COLOURS if name != task.label])
        rows.append({"prompt": task.prompt, "chosen": task.label, "rejected": other, "images": [str(folder / f"{number}.png")]})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with random weights: the last token of its own answers, which was never trained to tell of them, does not."""
    folder = tmp_path_factory.mktemp("untrained") / "model"
    shutil.copytree(located_model(VISION_MODEL), folder)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("method", "epochs", "figure", "bound"), METHODS, ids=[method[0] for method in METHODS])
def test_a_method_prefers_right_answers_to_unseen_pictures(
    method: str, epochs: float, figure: str, bound: float, tmp_path: Path, pairs: Path, untrained: str
) -> None:
    model = untrained if method == "reward-model" else VISION_MODEL
    settings: dict[str, Any] = {"num_epochs": epochs, "batch_size": 16, "learning_rate": 1e-3, "eval_size": 32, "tensorboard": False}
    result = tune(method, model=model, data=str(pairs), run_dir=tmp_path / "run", **settings)
    evaluated = result.summary["eval"]
    assert evaluated["last"][figure] > bound
    assert evaluated["last"]["loss"] < evaluated["first"]["loss"]
    assert (result.model / "processor_config.json").is_file()
    names = load_file(result.model / "model.safetensors")
    assert any("vision_model" in name for name in names)
    assert ("score.weight" in names) == (method == "reward-model")


@pytest.mark.parametrize("method", ["dpo", "reward-model"])
def test_an_adapter_is_merged_into_the_model_with_its_processor(method: str, tmp_path: Path, pairs: Path) -> None:
    settings: dict[str, Any] = {"num_steps": 2, "lora_rank": 4, "batch_size": 4, "eval_size": 0, "tensorboard": False}
    result = tune(method, model=VISION_MODEL, data=str(pairs), run_dir=tmp_path / "run", **settings)
    merge_into_base(result.model, tmp_path / "merged")
    before, after = load_file(Path(located_model(VISION_MODEL)) / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name in before.keys() & after.keys() if not np.array_equal(before[name], after[name])}
    assert changed
    assert all("text_model" in name for name in changed)
    assert (tmp_path / "merged" / "processor_config.json").is_file()
