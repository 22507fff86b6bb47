"""Make the bundled vision model: Idefics3 of a million parameters, pretrained on drawn pictures by ``agentrl sft`` on one core.

Run it as::

    python -m examples.vision_model.make --out DIR

The text part begins as the bundled chat model. Training has two phases: in the first all answers are right; in the second a
share of them is drawn at random, which spreads the model's probability over right and wrong answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from agentrl.tune import tune
from examples.vision_model.corpus import MISTAKES, rows
from examples.vision_model.model import save_new_model

BATCH_SIZE, ROWS = 32, 1_800
PHASES = ((0.0, 0.5, 330, 2e-3), (MISTAKES, 0.0, 40, 5e-4))
"""Shares of mistakes and of descriptions, steps and learning rate of each phase."""


def make(out: Path, *, seed: int = 0, scale: float = 1.0) -> None:
    """Write the model into a new directory; `scale` shortens the training."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_new_model(Path(folder) / "new", seed=seed)
        for number, (mistakes, descriptions, steps, rate) in enumerate(PHASES):
            count, data = max(1, int(scale * steps)), Path(folder) / f"{number}.jsonl"
            drawn = rows(min(ROWS, count * BATCH_SIZE), seed=seed + number, mistakes=mistakes, descriptions=descriptions)
            data.write_text("\n".join(map(json.dumps, drawn)), encoding="utf-8")
            settings = {"num_steps": count, "batch_size": BATCH_SIZE, "learning_rate": rate, "lr_schedule": "cosine"}
            run = tune("sft", data=str(data), model=str(model), run_dir=f"{folder}/run-{number}", seed=seed, **settings)
            model = run.model
        shutil.copytree(model, out, ignore=shutil.ignore_patterns("manifest.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write, which must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps")
    chosen = parser.parse_args()
    make(chosen.out, seed=chosen.seed, scale=chosen.scale)
