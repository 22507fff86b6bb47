"""Save a learner in one layout, load it in another, and look at everything that was carried over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.learner_support import CollectingSender, make_groups, make_settings

EVERYTHING: dict[str, Any] = {
    "learner": {"ema_decay": 0.5, "critic_warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5},
    "algo": {"advantage_estimator": "gae", "init_kl_coef": 0.1, "kl_target": 0.01, "ref_reset_every": 2},
}


def started(model: str, stage: int, *, dtype: str = "float32", rank: int = 0, world_size: int = 1, port: int = 0) -> Any:
    """A rank of a learner that has everything: critic, reference, moving average, KL controller, two groups of parameters."""
    from agentrl.learner.learner import LearnerRank

    learner = {**EVERYTHING["learner"], "zero_stage": stage, "learner_dtype": dtype}
    started = LearnerRank(make_settings(model, learner=learner, algo=EVERYTHING["algo"]), CollectingSender())
    started.start(rank, world_size, port)
    return started


def train(learner: Any, first: int, last: int) -> None:
    for step in range(first, last):
        learner.train(step, *make_groups(5, 3, seed=step, version=step))


def save(learner: Any, folder: Path, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    learner.save_checkpoint(str(folder), step)


def optimizer_state(learner: Any, folder: Path) -> dict[str, Tensor]:
    """Everything that the optimizers of a checkpoint hold, by name; `learner` gives the names."""
    from agentrl.learner.deepspeed.saved import saved_engine
    from agentrl.learner.saved import MOMENTS, read_tensors

    layout, found = read_tensors(folder / "rank-0.pt")["layout"], {}
    models = learner._started.models
    for kind, engine in (("policy", models.policy), ("critic", models.critic)):
        saved = saved_engine(folder / kind, layout, engine.module, learner._started.settings.learner)
        for name, _ in engine.module.named_parameters():
            found[f"{kind} {name}"] = saved[name].clone()
            found |= {f"{kind} {name} {key}": moment.clone() for key in MOMENTS if (moment := saved.moment(name, key)) is not None}
            found[f"{kind} {name} step"] = torch.tensor(saved.step(name))
    return found


def weights(learner: Any) -> dict[str, Tensor]:
    """Weights of every model; every rank calls, the first has all of them."""
    from agentrl.learner.deepspeed.parameters import PARAMETERS

    state = learner._started
    models = {"policy": state.models.policy.module, "critic": state.models.critic.module}
    models["reference"] = getattr(state.models.reference, "module", state.models.reference)
    found = {f"{kind} {name}": tensor.clone() for kind, module in models.items() for name, tensor in PARAMETERS.named(module)}
    found |= {f"average {name}": tensor.clone() for name, tensor in state.average.weights()}
    return found


TOLERANCE = 1e-4
"""Most that float32 weights differ two steps later: sums in another order, enlarged where Adam divides by a tiny gradient.

Seen are 1e-5; without the moments, or with the wrong count of updates, it would be the learning rate, 1e-2.
"""
