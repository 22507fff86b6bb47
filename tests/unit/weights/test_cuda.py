"""The sender to groups of engines: what it says, when weights may change, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from agentrl.cluster.ray_actors import merged
from agentrl.core.errors import WeightSyncError
from agentrl.core.protocols import Membership
from tests.group_support import HANDLES, Engine, sender

ONE = Membership(1, ("engine-0",))


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_the_first_update_of_a_membership_says_where_to_meet_and_what_comes_and_later_ones_the_version(kind: str) -> None:
    weights, learner, engine = [("a", torch.ones(2, 3)), ("b", torch.zeros(4))], sender(kind), Engine("engine-0", kind)
    update = learner.send(weights, 5, ONE)
    assert update is not None
    assert update.payload["update"] == {"names": ["a", "b"], "dtype_names": ["float32", "float32"], "shapes": [[2, 3], [4]]}
    assert update.payload["connect"]["places"]["0"][0] == "127.0.0.1"
    assert engine.take(update) == ""
    learner.settle()
    again = learner.send(weights, 6, ONE)
    assert again is not None
    assert (again.version, again.payload, again.members) == (6, {}, ONE)
    assert engine.take(again) == ""
    learner.settle()
    other = learner.send(weights, 6, Membership(2, ("engine-0",)))
    assert other is not None
    assert other.payload["connect"]["places"] != update.payload["connect"]["places"]
    assert engine.take(other) == ""
    learner.settle()
    learner.close()
    engine.member.leave()


def test_weights_may_change_once_the_sender_has_settled() -> None:
    weight, learner, engine = torch.ones(3), sender(), Engine("engine-0")
    update = learner.send([("a", weight)], 1, ONE)
    assert update is not None
    assert engine.take(update) == ""
    learner.settle()
    weight.zero_()  # the next optimizer step
    assert engine.loaded["a"].tolist() == [1.0] * 3
    learner.close()
    engine.member.leave()


class Weights:
    """Weights of a model in parts, which every rank has to go over to the end."""

    def __init__(self) -> None:
        self.gathered: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            self.gathered.append(name)
            yield name, torch.zeros(400)


def test_ranks_without_engines_take_part_in_gathering_and_send_nothing() -> None:
    weights, learner = Weights(), sender(rank=1)
    update = learner.send(weights, 1, ONE)
    assert update is not None
    assert update.payload["connect"]["places"] == {}
    learner.settle()
    assert weights.gathered == ["a", "b", "c"] * 2  # once for the description
    learner.send(weights, 2, ONE)
    learner.settle()
    assert weights.gathered == ["a", "b", "c"] * 3
    learner.close()


def test_a_rank_that_gives_up_goes_over_the_rest_because_the_others_gather_it_too() -> None:
    weights, learner = Weights(), sender()
    learner.send(weights, 1, ONE)
    learner.abandon("nobody is there")
    assert weights.gathered == ["a", "b", "c"] * 2
    learner.settle()  # nothing is under way any more
    learner.close()


def test_a_transfer_that_failed_is_reported_before_the_next_step() -> None:
    learner = sender(timeout_s=0.2)
    learner.send([("a", torch.zeros(1))], 1, ONE)
    with pytest.raises(WeightSyncError, match=r"did not reach the engines: 1 workers of engines did not arrive within 0\.2 s"):
        learner.settle()
    learner.close()


def test_a_transfer_waits_for_every_worker_of_every_engine() -> None:
    learner = sender(timeout_s=0.2, workers=2)
    learner.send([("a", torch.zeros(1))], 1, Membership(1, ("engine-0", "engine-1")))
    with pytest.raises(WeightSyncError, match="4 workers of engines did not arrive"):
        learner.settle()
    learner.close()


def test_without_members_nothing_is_sent() -> None:
    with pytest.raises(WeightSyncError, match="engines that are named"):
        sender().send([("a", torch.zeros(1))], 1)


def test_every_rank_has_a_meeting_point_of_its_own_where_gpus_are_shared() -> None:
    """Two engines of two workers: ranks 0 and 1 send to the first, 2 and 3 to the second, and one of them is lost."""
    learners = [sender("ipc", rank=rank, workers=2) for rank in range(4)]
    updates = [learner.send([("a", torch.zeros(1))], 1, Membership(1, ("engine-1",))) for learner in learners]
    assert sorted(merged(updates).payload["connect"]["places"]) == ["2", "3"]
    for learner in learners:
        learner.close()


def test_two_buckets_are_shared_at_most_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    allocate = HANDLES.allocate

    def counted(size: int, device: torch.device) -> Any:
        allocated.append(size)
        return allocate(size, device)

    monkeypatch.setattr(HANDLES, "allocate", counted)
    learner, engine = sender("ipc", bucket_bytes=10_000), Engine("engine-0", "ipc")
    model = [(f"w{index}", torch.full((1000,), float(index))) for index in range(40)]
    for version in (1, 2):
        update = learner.send(model, version, ONE)
        assert update is not None
        assert engine.take(update) == ""
        learner.settle()
        assert allocated == [12_000, 12_000]  # of 160,000 bytes
        allocated.clear()
        group = learner._group
        assert group is not None
        assert not group.channel._shared  # type: ignore[attr-defined]
        assert not engine.member._group.channel._opened  # type: ignore[union-attr, attr-defined]
    assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in model)
    learner.close()
    engine.member.leave()
