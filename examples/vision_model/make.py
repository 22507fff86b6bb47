"""Make the bundled vision model: Idefics3 of 0.65 million parameters, pretrained on drawn pictures by ``agentrl sft`` on one core.

Run it as::

    python -m examples.vision_model.make --out DIR

Training begins with random weights and has phases, each a run of ``agentrl sft`` on new pictures. In all but the last one the model
learns to see: it lists what is in a picture and answers questions, all of them rightly. In the last phase it plays the environments,
and a share of its answers is drawn at random, which spreads its probability over right and wrong answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.tune import tune
from examples.vision_model.corpus import MISTAKES, rows
from examples.vision_model.model import save_new_model

BATCH_SIZE, WARMUP = 8, 20
ROWS = 4000
"""Rows of a phase at most, which none of the phases above sees twice; most pictures of shapes come in one phase only."""


@dataclass(frozen=True)
class Phase:
    """A run of ``agentrl sft``.

    Attributes:
        steps: Batches of rows of its own.
        learning_rate: The highest, after a warm-up.
        schedule: Shape of the learning rate after the warm-up.
        mistakes: Share of mistakes in episodes of the environments; `None`: rows with many words about each picture.
    """

    steps: int
    learning_rate: float
    schedule: str = "constant"
    mistakes: float | None = None


PHASES = (*[Phase(500, 5e-3)] * 3, Phase(500, 4e-3, "cosine"), Phase(200, 7e-4, "cosine", MISTAKES))


def trained(model: Path, number: int, folder: Path, *, seed: int = 0, scale: float = 1.0) -> Path:
    """Return a new directory inside `folder` with a model that went through a phase; `scale` shortens it."""
    phase, data = PHASES[number], folder / f"{number}.jsonl"
    steps = max(1, int(scale * phase.steps))
    drawn = rows(min(ROWS, steps * BATCH_SIZE), seed=len(PHASES) * seed + number, mistakes=phase.mistakes)
    data.write_text("\n".join(map(json.dumps, drawn)), encoding="utf-8")
    return tune(
        "sft",
        data=str(data),
        model=str(model),
        run_dir=str(folder / f"run-{number}"),
        seed=seed,
        num_steps=steps,
        batch_size=BATCH_SIZE,
        learning_rate=phase.learning_rate,
        optimizer="muon",
        lr_schedule=phase.schedule,
        lr_warmup_steps=min(WARMUP, steps - 1),
        eval_size=0,
    ).model


def make(out: Path, *, seed: int = 0, scale: float = 1.0) -> None:
    """Write the model into a new directory; `scale` shortens the training."""
    with tempfile.TemporaryDirectory() as name:
        model = save_new_model(Path(name) / "new", seed=seed)
        for number in range(len(PHASES)):
            model = trained(model, number, Path(name), seed=seed, scale=scale)
        shutil.copytree(model, out, ignore=shutil.ignore_patterns("manifest.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write, which must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps")
    chosen = parser.parse_args()
    make(chosen.out, seed=chosen.seed, scale=chosen.scale)
