"""Runs on pictures: several ranks, publications, checkpoints and resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.e2e.runs import ROOT, Run, succeeded, train
from tests.faults.support import disturbed, kill, lines, until
from tests.image_support import group_of_text, group_with_images, reader_of
from tests.learner_support import CollectingSender, gradients, largest_difference, make_settings
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STAGES = (0, 1, 2, 3)
STEPS = 20
ALBUM = """
import numpy as np
from agentrl import AgentInstance, ResetResult, StepResult, Task

def picture(seed):
    return np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)

class Album(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task("Look.", label=n, images=[picture(n)]) for n in range(40)]

    def reset(self, state):
        return ResetResult("Look.", images=[picture(100 + state.label)])

    def step(self, state):
        last = state.turn == 2
        reward = float(len(state.action_text) % 3 == 0)
        return StepResult(reward, "And now?", images=[] if last else [picture(1000 + 10 * state.label + state.turn)], terminated=last)
"""
"""Pictures in the prompt, at the beginning, and after each answer, whatever it is."""
SMALL = (
    "--runtime",
    "local",
    "--skip-checks",
    "env",
    "model",
    "--groups-per-step",
    "4",
    "--n-samples-per-prompt",
    "4",
    "--max-new-tokens",
    "6",
)


def groups(model: str) -> list[Any]:
    """Rows with and without images, so that some micro-batches of a rank have none."""
    reader = reader_of(model)
    return [group_of_text(0), group_with_images(reader, 1), group_of_text(2), group_with_images(reader, 3, own_first=True)]


def settings_of(model: str, stage: int, **changes: Any) -> Any:
    return make_settings(model, learner={"zero_stage": stage, "train_vision": True, "micro_batch_tokens": 60, **changes})


def on_rank(rank: int, ports: list[int], model: str, out: Path) -> None:
    for stage, port in zip(STAGES, ports, strict=False):
        found = gradients(settings_of(model, stage), tuple(groups(model)), rank=rank, world_size=2, port=port)
        torch.save(found, out / f"{stage}-{rank}.pt")
    torch.save(frozen_step(model, rank=rank, world_size=2, port=ports[-1]), out / f"frozen-{rank}.pt")


def frozen_step(model: str, *, rank: int = 0, world_size: int = 1, port: int = 0) -> dict[str, Any]:
    """Weights after a step that leaves the vision part alone."""
    from agentrl.learner.learner import LearnerRank

    sender = CollectingSender()
    learner = LearnerRank(settings_of(model, 2, train_vision=False), sender)
    learner.start(rank, world_size, port)
    learner.train(0, *groups(model))
    learner.export_weights(1)
    learner.close()
    return sender.weights


def test_two_ranks_compute_what_one_does(vision_model: str, tmp_path: Path) -> None:
    mp.spawn(on_rank, args=(free_ports(len(STAGES) + 1), vision_model, tmp_path), nprocs=2)
    alone = gradients(settings_of(vision_model, 0), tuple(groups(vision_model)))
    for stage in STAGES:
        for rank in (0, 1):
            assert largest_difference(alone, torch.load(tmp_path / f"{stage}-{rank}.pt")) < 1e-5
    weights = frozen_step(vision_model)
    assert largest_difference(weights, torch.load(tmp_path / "frozen-0.pt")) < 1e-3


def test_the_vision_part_stays_as_it_is(vision_model: str) -> None:
    from transformers import AutoModelForImageTextToText

    before = dict(AutoModelForImageTextToText.from_pretrained(vision_model).named_parameters())
    after = frozen_step(vision_model)
    moved = {name for name in after if not torch.equal(after[name], before[name].detach())}
    assert not any("vision_model" in name for name in moved)
    assert {name.split(".")[1] for name in moved} >= {"connector", "text_model"}


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_killed_run_on_pictures_ends_as_one_that_was_not_killed(vision_model: str, tmp_path: Path, engine: str) -> None:
    env = tmp_path / "album.py"
    env.write_text(ALBUM)
    words = ("--model", vision_model, "--engine", engine, "--save-every", "4", "--seed", "4", "--num-steps", str(STEPS), *SMALL)
    once = succeeded(train(tmp_path / "once", *words, agent=env, timeout_s=800))
    differences = [row["mismatch/max"] for row in once.metrics]
    assert len(differences) == STEPS
    assert max(differences) < 1e-4
    assert {row["episode/turns_mean"] for row in once.metrics} == {3.0}
    killed = tmp_path / "killed"
    with disturbed("--run-dir", str(killed), "--agent", str(env), *words) as process:
        until(process, lambda: len(lines(killed / "metrics.jsonl")) >= STEPS // 2)
        kill(process)
    again = succeeded(train(killed, "--resume", "auto", *words, agent=env, timeout_s=800))
    assert weights(again) == weights(once)
    assert [row["mismatch/max"] for row in again.metrics] == differences


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("agent", "low", "high"),
    [("envs/shapes.py", 0.3, 1.0), ("tests/benchmarks/_shuffled.py:Shuffled", -0.1, 0.1)],
)
def test_the_bundled_model_learns_from_pictures_that_show_the_answer(agent: str, low: float, high: float, tmp_path: Path) -> None:
    """The score on tasks that are not trained on rises, and not where the pictures are those of other questions."""
    config = str(ROOT / "examples/recipes/cpu" / "pictures.toml")
    run = succeeded(train(tmp_path / "run", "--config", config, "--record", "none", "--no-save-model", agent=ROOT / agent, timeout_s=900))
    first, *_, last = [row["eval/score"] for row in run.metrics if row.get("eval/score") is not None]
    assert low < last - first < high
