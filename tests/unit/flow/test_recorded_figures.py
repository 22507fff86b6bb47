"""Simulations of the runs that docs/benchmarks.md records, from the figures of their synchronous steps, within 15 %."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.resolve.parts import flow_plan
from tests.simulated_engine import EngineModel
from tests.simulation import LearnerModel, Plan, constant, episodes_of, simulate

PAGE = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
GROUPS, SAMPLES, TURNS = 16, 8, 4
SHARE = 0.5
"""Share of a decoding step that is taken to grow with its sequences, as in predictions of a run that does not tell."""

Figures = tuple[float, float, float, float]  # of a synchronous step, s: all of it, generation, training, publication


def rows(pattern: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, found)) for found in re.findall(pattern, PAGE)]


def step_s(figures: Figures, max_staleness: int, *, share: float = SHARE, seats: int = 256) -> float:
    """Seconds of a step of 16 groups of 8 episodes of four turns of 12 to 16 tokens."""
    whole_s, generate_s, train_s, publish_s = figures
    token_s = generate_s / (TURNS * 14)
    settings = changed(
        TrainConfig(), num_steps=12, groups_per_step=GROUPS, n_samples_per_prompt=SAMPLES, max_staleness=max_staleness, stall_timeout_s=1e9
    )
    plan = Plan(
        settings=flow_plan(settings),
        num_engines=1,
        engine=EngineModel(
            token_s=token_s * (1 - share),
            token_s_per_sequence=token_s * share / (GROUPS * SAMPLES),
            max_sequences=seats,
            pause_s=constant(publish_s),
        ),
        learner=LearnerModel(step_s=train_s, overhead_s=max(0.0, whole_s - generate_s - train_s - publish_s)),
        episodes=episodes_of(tokens=lambda rng: float(rng.randint(12, 16)), turns=TURNS),
    )
    return simulate(plan).step_s


MODE = r"\| (\d+) \| [\d.]+ \| (\d+) \| (\d+) \| (\d+) \|"
SYNC, OVERLAPPED = rows(rf"\| synchronous {MODE}"), rows(rf"\| asynchronous, S = 1 {MODE}")


@pytest.mark.parametrize(("sync", "overlapped"), list(zip(SYNC, OVERLAPPED, strict=True)))
def test_asynchronous_steps_of_the_real_stack_follow_from_synchronous_ones(sync: Figures, overlapped: Figures) -> None:
    measured = tuple(value / 1000 for value in sync)
    assert step_s(measured, 0) == pytest.approx(measured[0], rel=0.15)
    assert step_s(measured, 1) == pytest.approx(overlapped[0] / 1000, rel=0.15)


@pytest.mark.parametrize(("generate", "train", "gain"), rows(r"\n\| (\d+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| \*\*"))
def test_gains_of_the_scripted_stack_come_out(generate: float, train: float, gain: float) -> None:
    """As many sequences as a step has are decoded at once, however many there are; a publication takes 30 ms."""
    figures = ((generate + train + 30) / 1000, generate / 1000, train / 1000, 0.03)
    assert step_s(figures, 0, share=0.0, seats=128) / step_s(figures, 1, share=0.0, seats=128) == pytest.approx(gain, rel=0.15)


def test_all_rows_are_read() -> None:
    assert (len(SYNC), len(OVERLAPPED), len(rows(r"\n\| (\d+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| \*\*"))) == (3, 3, 3)
