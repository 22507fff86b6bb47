"""The loops of one page do what `agentrl train` does, and the asynchronous one keeps its bound; real model, engine and learner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.protocols import WeightUpdate
from agentrl.core.types import Task
from examples import loop, loop_async

ENV = str(Path(__file__).parents[2] / "envs" / "calculator.py")
SIZES: dict[str, Any] = {"num_steps": 3, "groups_per_step": 4, "n_samples_per_prompt": 4, "max_new_tokens": 16, "learning_rate": 3e-4}
HERE: dict[str, Any] = {"runtime": "local", "engine": "transformers", "seed": 3}
MEET_S = 30.0


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the command."""
    run_dir = tmp_path_factory.mktemp("command") / "run"
    return agentrl.train(ENV, **SIZES, **HERE, run_dir=run_dir, skip_checks=("env",), tensorboard=False)


def test_the_loop_gives_the_weights_of_the_command_bit_for_bit(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(loop.train(agentrl.settings(ENV, **SIZES, **HERE), str(tmp_path / "model")))
    assert weights(tmp_path / "model") == weights(trained.model_path)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(printed) == 3
    for line, row in zip(printed, trained.metrics, strict=True):
        assert f"reward {row['reward/mean']:.3f}, |advantage| {row['advantage/abs']:.3f}, loss {row['loss']:.4f}" in line


def test_the_asynchronous_loop_without_staleness_is_the_synchronous_one(trained: Any, tmp_path: Path) -> None:
    asyncio.run(loop_async.train(agentrl.settings(ENV, **SIZES, **HERE), str(tmp_path / "model")))
    assert weights(tmp_path / "model") == weights(trained.model_path)


class Overlap:
    """Episodes that end only in the middle of a training step or of a publication, which wait for that in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, beside: str) -> None:
        self.begun, self.played = asyncio.Event(), asyncio.Event()
        self.met = 0
        play, publish, groups = agentrl.Engines.play, agentrl.Engines.publish, iter(range(10**6))

        async def held(engines: agentrl.Engines, task: Task) -> agentrl.PlayedGroup:
            later = next(groups) >= SIZES["groups_per_step"]  # the first step needs the groups before
            if later and not self.met:
                await asyncio.wait_for(self.begun.wait(), MEET_S)
            group = await play(engines, task)
            if later:
                self.played.set()
            return group

        async def published(engines: agentrl.Engines, update: WeightUpdate) -> None:
            if beside == "publication":
                await self.meet()
            await publish(engines, update)

        async def trained(learner: Any, step: int, groups: Any) -> Any:
            if beside == "training":
                await self.meet()
            return await train(learner, step, groups)

        from agentrl.cluster.runtime import ThreadedLearner

        train = ThreadedLearner.train
        monkeypatch.setattr(agentrl.Engines, "play", held)
        monkeypatch.setattr(agentrl.Engines, "publish", published)
        monkeypatch.setattr(ThreadedLearner, "train", trained)

    async def meet(self) -> None:
        if not self.met:
            self.begun.set()
            await asyncio.wait_for(self.played.wait(), MEET_S)
            self.met += 1


@pytest.mark.parametrize("beside", ["training", "publication"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_the_asynchronous_loop_overlaps_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, beside: str
) -> None:
    async def run() -> tuple[Overlap, list[dict[str, float]]]:
        overlap = Overlap(monkeypatch, beside)
        config = agentrl.settings(ENV, **{**SIZES, "num_steps": 5}, **HERE, max_staleness=staleness)
        return overlap, await loop_async.train(config, str(tmp_path / "model"))

    overlap, rows = asyncio.run(run())
    assert overlap.met == 1
    assert len(rows) == 5
    assert max(row["staleness/max"] for row in rows) in range(1, staleness + 1)
    assert all(row["staleness"] == row["staleness/max"] for row in rows)


def test_the_loops_fit_on_their_pages() -> None:
    lines = {module: Path(str(module.__file__)).read_text().count("\n") for module in (loop, loop_async)}
    assert lines[loop] <= 60
    assert lines[loop_async] <= 100
    for module in (loop, loop_async):
        imported = [line for line in Path(str(module.__file__)).read_text().splitlines() if "agentrl" in line and "import" in line]
        assert imported == ["import agentrl"]


def test_a_loop_on_a_cluster_is_told_where_the_tokens_are() -> None:
    group = agentrl.PlayedGroup(summary=None, episodes=object(), kept=True)  # type: ignore[arg-type]
    with pytest.raises(agentrl.ConfigError, match="advantage/abs"):
        agentrl.advantages([group], agentrl.settings(ENV))
