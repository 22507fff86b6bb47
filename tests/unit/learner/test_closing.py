"""A learner that is closed gives back its memory at once, without a garbage collection, which finds nothing of what was frozen before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.learner.learner import LearnerRank
from tests.learner_support import CollectingSender, make_groups, make_settings


@pytest.fixture
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def references(learner: LearnerRank) -> dict[str, weakref.ref[Any]]:
    """One tensor of each kind that is large."""
    engine = learner._started.models.policy.engine
    wrapped = engine.optimizer
    optimizer = getattr(wrapped, "optimizer", wrapped)
    master, state = next(iter(optimizer.state.items()))
    weights = next(engine.module.parameters())
    found = {"weights": getattr(weights, "ds_tensor", weights), "master weights": master, "optimizer": state["exp_avg"]}
    return {name: weakref.ref(tensor) for name, tensor in found.items()}


def alive(held: dict[str, weakref.ref[Any]]) -> set[str]:
    """Names of tensors that have numbers."""
    tensors = {name: reference() for name, reference in held.items()}
    return {name for name, tensor in tensors.items() if tensor is not None and tensor.untyped_storage().nbytes()}


@pytest.mark.usefixtures("_without_collections")
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")]
)
def test_a_closed_learner_holds_nothing(stage: int, dtype: str, tiny_model: str) -> None:
    learner = LearnerRank(make_settings(tiny_model, learner={"zero_stage": stage, "learner_dtype": dtype}), CollectingSender())
    learner.start(0, 1, 0)
    learner.train(0, *make_groups(seed=0, version=0))
    held = references(learner)
    assert alive(held) == set(held)
    learner.close()
    assert alive(held) == set()
    learner.close()
