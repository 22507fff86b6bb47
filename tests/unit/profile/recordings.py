"""What a simulated run would have recorded, so that what is concluded from it can be compared with what was put in."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentrl.profile.recorded import Recorded, read_recorded
from tests.simulated_engine import EngineModel
from tests.simulation import LearnerModel, Plan, Simulated, constant, episodes_of, lognormal, simulate
from tests.unit.flow.fakes import flow_of

ENGINE = EngineModel(token_s=0.010, token_s_per_sequence=0.0005, pause_s=constant(0.1), load_s=constant(0.05))
LEARNER = LearnerModel(step_s=0.5, token_s=0.0001, overhead_s=0.05, export_s=constant(0.02))
MIXED = episodes_of(tokens=lognormal(30, 0.7), env_s=lognormal(0.3, 1.0), turns=2)
STEADY = episodes_of(tokens=constant(40), env_s=constant(0.3), turns=2)


def plan(**changes: Any) -> Plan:
    """A run of known speeds; names of flow settings and of the plan may be changed."""
    flow = {"num_steps": 24, "groups_per_step": 8, "n_samples_per_prompt": 4, "max_staleness": 0, "stall_timeout_s": 1e9}
    flow |= {name: changes.pop(name) for name in list(changes) if name not in Plan.__dataclass_fields__}
    values = {"num_engines": 1, "engine": ENGINE, "learner": LEARNER, "episodes": MIXED, **changes}
    return Plan(settings=flow_of(**flow), **values)  # type: ignore[arg-type]


def recorded(run: Simulated) -> Recorded:
    """What is read from the files of a simulated run."""
    return read_recorded(run.steps, settings=run.plan.settings, num_learners=run.plan.learner.ranks)


@cache
def recorded_run(**changes: Any) -> tuple[Simulated, Recorded]:
    """A simulated run and what is read from its files; made once."""
    run = simulate(plan(**changes))
    return run, recorded(run)
