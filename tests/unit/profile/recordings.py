"""What a simulated run would have recorded, so that what is concluded from it can be compared with what was put in."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentrl.core.types import GroupRequest, Task
from agentrl.profile.recorded import Recorded, read_recorded
from agentrl.profile.simulated_engine import EngineModel, World
from agentrl.profile.simulation import LearnerModel, Plan, Simulated, constant, episodes_of, lognormal, simulate
from tests.unit.flow.fakes import flow_of

ENGINE = EngineModel(token_s=0.010, token_s_per_sequence=0.0005, pause_s=constant(0.1), load_s=constant(0.05))
LEARNER = LearnerModel(step_s=0.5, token_s=0.0001, overhead_s=0.05, export_s=constant(0.02))
MIXED = episodes_of(tokens=lognormal(30, 0.7), env_s=lognormal(0.3, 1.0), turns=2)


def plan(**changes: Any) -> Plan:
    """A run of known speeds; names of flow settings and of the plan may be changed."""
    flow = {"num_steps": 24, "groups_per_step": 8, "n_samples_per_prompt": 4, "max_staleness": 0, "stall_timeout_s": 1e9}
    flow |= {name: changes.pop(name) for name in list(changes) if name not in Plan.__dataclass_fields__}
    values = {"num_engines": 1, "engine": ENGINE, "learner": LEARNER, "episodes": MIXED, **changes}
    return Plan(settings=flow_of(**flow), **values)  # type: ignore[arg-type]


def records_of(run: Simulated, *, times: bool = True, members: int | None = None) -> list[dict[str, Any]]:
    """The lines of ``trajectories.jsonl``.

    Args:
        run: Simulated with `keep_groups`.
        times: Record when groups ended.
        members: Of each group, how many are recorded; all by default.
    """
    world, records = World(run.plan.episodes, run.plan.failure_rate, run.plan.seed), []
    for ended_s, summary in run.groups:
        group_request = GroupRequest(group_id=summary.group_id, task=Task(""), n_samples_per_prompt=len(summary.members), version=0)
        shapes, _ = world.group(group_request)
        for index, (member, shape) in enumerate(zip(summary.members, shapes, strict=True)):
            if index < (members or len(shapes)):
                record = {
                    "group_id": summary.group_id,
                    "attempt": 0,
                    "episode_id": f"{summary.group_id}-0-{index}",
                    "version": summary.versions[0] if summary.versions else 0,
                    "status": str(member.status),
                    "timings": dict(member.timings),
                    "turns": [{"number": number, "token_ids": [1] * round(tokens)} for number, (tokens, _) in enumerate(shape.turns)],
                }
                records.append(record | ({"ended_s": 1e9 + ended_s, "group_s": summary.seconds} if times else {}))
    return records


def recorded(run: Simulated, *, max_sequences: int = 256, **how: Any) -> Recorded:
    """What is read from the files of a simulated run."""
    return read_recorded(
        settings=run.plan.settings,
        num_engines=run.plan.num_engines,
        num_learners=run.plan.learner.ranks,
        max_sequences=max_sequences,
        metrics=run.steps,
        records=records_of(run, **how),
    )


@cache
def recorded_run(**changes: Any) -> tuple[Simulated, Recorded]:
    """A simulated run and what is read from its files; made once."""
    run = simulate(plan(**changes), keep_groups=True)
    return run, recorded(run)
