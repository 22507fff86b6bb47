"""The best model: kept with its moving average, searched for anew by a new run, and nothing left of one that could not be kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import CheckpointError
from agentrl.evaluation.best import Best, BestModel, read_best


class Learner:
    """Writes a model and its moving average."""

    def __init__(self) -> None:
        self.saved = 0

    async def save_model(self, path: str) -> None:
        self.saved += 1
        (Path(path) / "weights").write_text(f"weights {self.saved}")
        average = Path(path).with_name(f"{Path(path).name}-ema")
        average.mkdir()
        (average / "weights").write_text(f"average {self.saved}")


def best_of(run_dir: Path, *, resumed: bool = False) -> BestModel:
    learner: Any = Learner()
    return BestModel(run_dir, learner, "eval/score", resumed=resumed)


@pytest.mark.anyio
async def test_the_first_of_equal_models_is_kept_with_its_average(tmp_path: Path) -> None:
    best = best_of(tmp_path)
    assert [bool(await best.consider(step, {"eval/score": value})) for step, value in ((1, 0.5), (2, 0.5), (3, 0.75), (4, 0.25))] == [
        True,
        False,
        True,
        False,
    ]
    assert (tmp_path / "best" / "weights").read_text() == "weights 2"
    assert (tmp_path / "best-ema" / "weights").read_text() == "average 2"
    assert read_best(tmp_path) == best.best == Best(step=3, metric="eval/score", value=0.75)
    assert sorted(os.listdir(tmp_path)) == ["best", "best-ema"]


@pytest.mark.anyio
async def test_a_new_run_searches_anew_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    await best_of(tmp_path).consider(9, {"eval/score": 0.9})
    assert best_of(tmp_path, resumed=True).best == Best(step=9, metric="eval/score", value=0.9)
    new = best_of(tmp_path)
    assert new.best is None
    assert await new.consider(1, {"eval/score": 0.1})
    assert read_best(tmp_path) == Best(step=1, metric="eval/score", value=0.1)


@pytest.mark.anyio
async def test_nothing_is_left_of_a_model_that_could_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = best_of(tmp_path)

    def refuse(*given: Any) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("agentrl.evaluation.best.replace_directory", refuse)
    with pytest.raises(CheckpointError):
        await best.consider(1, {"eval/score": 0.5})
    assert (os.listdir(tmp_path), best.best) == ([], None)
