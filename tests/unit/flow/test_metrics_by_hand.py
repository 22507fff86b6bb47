"""The metrics of an asynchronous run whose every moment is known.

Two groups a step, one step ahead; training takes 3 s, the export 0.25 s, loading 0.2 s and then 0.3 s of pause; tokens take 10 ms.

    groups 0, 1   0.00 to 1.00    taken at 1.00, trained until  4.00, exported  4.25, live  4.75
    groups 2, 3   0.00 to 0.50    taken at 4.25, trained until  7.25, exported  7.50, live  8.00
    groups 4, 5   4.75 to 6.75    taken at 7.50, trained until 10.50, exported 10.75, live 11.25
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentrl.core.types import GroupRequest
from agentrl.flow.driver import train
from agentrl.flow.pool import RolloutPool
from tests.simulated_engine import EngineModel, EpisodeShape, SimulatedWorker, World
from tests.simulation import LearnerModel, SimulatedLearner, constant, run_virtual
from tests.unit.flow.fakes import Recorder, endless_tasks, flow_of

TOKENS = {0: 100, 1: 100, 2: 50, 3: 50, 4: 200, 5: 200}


class Script(World):
    """Every group has one episode of a known length."""

    def group(self, group_request: GroupRequest) -> tuple[Sequence[EpisodeShape], list[bool]]:
        return [EpisodeShape(0.0, ((TOKENS[group_request.group_id], 0.0),))], [False]


def steps_of_the_run() -> list[dict[str, float]]:
    observer = Recorder()

    async def main() -> None:
        engine = EngineModel(token_s=0.01, load_s=constant(0.2), pause_s=constant(0.3))
        worker = SimulatedWorker(engine, Script(lambda rng, size: [], 0.0, 0))
        await train(
            settings=flow_of(num_steps=3, groups_per_step=2, n_samples_per_prompt=1, max_staleness=1),
            pool=RolloutPool({"engine-0": worker}),
            learner=SimulatedLearner(LearnerModel(step_s=3.0, export_s=lambda rng: 0.25)),
            tasks=endless_tasks(),
            observer=observer,
        )

    run_virtual(main)
    return observer.steps


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("time_s", [4.75, 8.0, 11.25]),
        ("time/step_s", [4.0, 3.25, 3.25]),
        ("time/train_s", [3.0, 3.0, 3.0]),
        ("time/learner_s", [3.0, 3.0, 3.0]),
        ("idle/learner", [1 - 3 / 4, 1 - 3 / 3.25, 1 - 3 / 3.25]),
        ("idle/generator", [1 - 1 / 4.75, 1 - 2 / 3.25, 1.0]),
        ("tokens_per_s", [300 / 4.75, 400 / 3.25, 0.0]),
        ("queue/depth", [2, 0, 0]),
        ("queue/wait_s", [0.0, 4.25 - 0.5, 7.5 - 6.75]),
        ("publish/seconds", [0.5, 0.5, 0.5]),
        ("publish/export_s", [0.25, 0.25, 0.25]),
        ("publish/pause_s", [0.3, 0.3, 0.3]),
        ("group/seconds_mean", [1.0, 0.5, 2.0]),
        ("staleness/mean", [0, 1, 1]),
        ("staleness/admission_mean", [0, 1, 1]),
    ],
)
def test_every_figure_is_what_the_timeline_says(name: str, values: list[float]) -> None:
    assert [row[name] for row in steps_of_the_run()] == pytest.approx(values)
