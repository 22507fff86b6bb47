"""Whatever finishes when, whatever is filtered or fails: no group too old, none lost, none twice."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.sections import changed
from agentrl.core.errors import NothingToTrainError, StalenessError, TooManyFailuresError
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.queue import Accepted, GroupQueue
from agentrl.flow.sizes import FlowPlan
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, failed_member, flow_of, run_virtual


@dataclass(frozen=True)
class Script:
    """Decides by hashing what happens to each group, whenever it happens."""

    seed: int
    timing: int
    filter_rate: float
    failure_rate: float
    max_attempts: int = 2

    def roll(self, *what: object) -> float:
        return random.Random(repr((self.seed, *what))).random()

    def duration(self, group_request: GroupRequest) -> float:
        roll = self.roll("duration", self.timing, group_request.group_id, group_request.attempt)
        return 30.0 * roll if roll > 0.9 else roll  # a tenth of the groups is far slower than the rest

    def train_s(self, step: int) -> float:
        return 2.0 * self.roll("train", self.timing, step)

    def fails(self, group_id: int, attempt: int) -> bool:
        return self.roll("fail", group_id, attempt) < self.failure_rate

    def outcome(self, group_request: GroupRequest) -> Sequence[MemberSummary] | None:
        return [failed_member()] * group_request.n_samples_per_prompt if self.fails(group_request.group_id, group_request.attempt) else None

    def rejects(self, group_id: int) -> bool:
        return self.roll("filter", group_id) < self.filter_rate

    def keep(self, summary: GroupSummary) -> str | None:
        return "unwanted" if self.rejects(summary.group_id) else None

    def fate(self, group_id: int) -> str:
        if all(self.fails(group_id, attempt) for attempt in range(self.max_attempts)):
            return "dropped"
        return "filtered" if self.rejects(group_id) else "trained"


def scene_of(script: Script, flow: FlowPlan, num_workers: int, num_tasks: int) -> Scene:
    workers = [ScriptedWorker(duration=script.duration, outcome=script.outcome, load_s=0.3) for _ in range(num_workers)]
    tasks: Iterator[Task] = (Task(prompt=str(i), position=i) for i in range(num_tasks))
    return Scene(flow, workers=workers, learner=ScriptedLearner(train_s=script.train_s), tasks=tasks, keep=script.keep)


scripts = st.builds(
    Script,
    seed=st.integers(0, 2**32),
    timing=st.integers(0, 2**32),
    filter_rate=st.sampled_from([0.0, 0.2, 0.6]),
    failure_rate=st.sampled_from([0.0, 0.1, 0.5]),
)


def bounded(staleness: int, size: int, num_steps: int) -> FlowPlan:
    return flow_of(
        num_steps=num_steps,
        groups_per_step=size,
        n_samples_per_prompt=2,
        max_staleness=staleness,
        advantage_estimator="group_norm",
        max_failure_rate=1.0,
    )


@pytest.mark.parametrize("staleness", range(5))
@given(
    script=scripts,
    size=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    workers=st.integers(1, 3),
    num_tasks=st.sampled_from([7, 1000, 1000]),
)
@settings(max_examples=150, deadline=None)
def test_bounded_staleness_and_conservation(
    staleness: int, script: Script, size: int, num_steps: int, workers: int, num_tasks: int
) -> None:
    scene = scene_of(script, bounded(staleness, size, num_steps), workers, num_tasks)
    try:
        counts = scene.run().counts
    except (NothingToTrainError, TooManyFailuresError):  # the tasks ran out and not one group could be trained on
        assert not scene.learner.steps
        assert all(script.fate(group_id) != "trained" for group_id in range(num_tasks))
        return
    seen = {(group_request.group_id, group_request.attempt): group_request for worker in scene.workers for group_request in worker.seen}
    assert len(seen) == sum(len(worker.seen) for worker in scene.workers)  # no attempt was made twice
    submitted = sorted({group_id for group_id, _ in seen})
    assert submitted == list(range(counts.submitted))
    fates = [script.fate(group_id) for group_id in submitted]
    assert scene.learner.trained_ids == [group_id for group_id, fate in zip(submitted, fates, strict=True) if fate == "trained"]
    assert (counts.trained, counts.filtered.get("unwanted", 0), sum(counts.dropped.values())) == tuple(
        fates.count(fate) for fate in ("trained", "filtered", "dropped")
    )
    assert counts.in_flight == 0
    assert all(len(step) == size for step in scene.learner.steps[:-1])
    versions = {summary.group_id: summary.versions for summary in scene.observer.groups if summary.versions}
    for step, refs in enumerate(scene.learner.steps):
        for group_id in (int(ref.removeprefix("ref ")) for ref in refs):
            assert 0 <= step - versions[group_id][0] <= staleness
            assert step - seen[group_id, 0].version <= staleness  # the weights live at admission are within the bound too


@pytest.mark.parametrize("staleness", range(4))
@given(
    script=scripts,
    size=st.integers(1, 4),
    oversampled=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    workers=st.integers(1, 3),
    num_tasks=st.sampled_from([7, 1000, 1000]),
)
@settings(max_examples=150, deadline=None)
def test_oversampled_groups_keep_the_bound_and_the_accounts(
    staleness: int, script: Script, size: int, oversampled: int, num_steps: int, workers: int, num_tasks: int
) -> None:
    scene = scene_of(script, changed(bounded(staleness, size, num_steps), oversample=oversampled / size), workers, num_tasks)
    try:
        counts = scene.run().counts
    except (NothingToTrainError, TooManyFailuresError):
        assert not scene.learner.steps
        assert all(script.fate(group_id) != "trained" for group_id in range(num_tasks))
        return
    seen = {(group_request.group_id, group_request.attempt): group_request for worker in scene.workers for group_request in worker.seen}
    trained = scene.learner.trained_ids
    given_up = counts.dropped.get("oversampled", 0)
    assert counts.in_flight == 0
    assert not any(worker.live for worker in scene.workers)  # what was given up does not go on
    assert counts.submitted == counts.trained + sum(counts.filtered.values()) + sum(counts.dropped.values())
    assert trained == sorted(set(trained))  # each at most once, first-in first-out
    assert all(script.fate(group_id) == "trained" for group_id in trained)
    assert given_up <= oversampled * len(scene.learner.steps)
    if num_tasks == 1000:
        assert [len(step) for step in scene.learner.steps] == [size] * num_steps
        assert given_up == oversampled * num_steps
    versions = {summary.group_id: summary.versions for summary in scene.observer.groups if summary.versions}
    for step, refs in enumerate(scene.learner.steps):
        for group_id in (int(ref.removeprefix("ref ")) for ref in refs):
            assert 0 <= step - versions[group_id][0] <= staleness
            assert step - seen[group_id, 0].version <= staleness


def test_a_slow_group_does_not_hold_up_a_step_that_has_oversampled_groups() -> None:
    def slow(group_request: GroupRequest) -> float:
        return 100.0 if group_request.group_id % 5 == 2 else 1.0

    seconds = {}
    for oversampled in (0, 1):
        flow = flow_of(num_steps=6, groups_per_step=4, n_samples_per_prompt=2, oversample=oversampled / 4)
        scene = Scene(flow, workers=[ScriptedWorker(duration=slow)])
        seconds[oversampled] = scene.run().seconds
        assert (set(scene.learner.trained_ids) & set(range(2, 30, 5)) == set()) is bool(oversampled)
    assert seconds[1] < 20 < 100 < seconds[0]


@given(script=scripts, other_timing=st.integers(0, 2**32), size=st.integers(1, 4), workers=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_a_synchronous_run_trains_the_same_groups_whatever_the_timing(script: Script, other_timing: int, size: int, workers: int) -> None:
    slow = Script(script.seed, other_timing, script.filter_rate, script.failure_rate)
    runs = [scene_of(s, bounded(0, size, 5), workers, 1000) for s in (script, slow)]
    for scene in runs:
        scene.run()
    assert runs[0].learner.steps == runs[1].learner.steps
    assert [row["reward/mean"] for row in runs[0].observer.steps] == [row["reward/mean"] for row in runs[1].observer.steps]


@given(order=st.permutations(range(12)), gone=st.sets(st.integers(0, 11), max_size=8), size=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_queue_yields_accepted_groups_in_order_of_admission(order: list[int], gone: set[int], size: int) -> None:
    queue = GroupQueue(0, size)

    async def drain() -> list[int]:
        for group_id in range(12):
            queue.admit(group_id)
        for group_id in order:
            queue.discard(group_id) if group_id in gone else queue.accept(accepted(group_id))
        queue.close()
        taken: list[int] = []
        while groups := (await queue.take(0)).groups:
            taken += [group.group_request.group_id for group in groups]
        return taken

    assert run_virtual(drain) == [group_id for group_id in range(12) if group_id not in gone]


def accepted(group_id: int) -> Accepted:
    group_request = GroupRequest(group_id=group_id, task=Task("x"), n_samples_per_prompt=1, version=0)
    return Accepted(group_request, None, GroupSummary(group_id=group_id, members=(), versions=(0, 0), seconds=0.0), 0.0)


class ArrivalQueue(GroupQueue):
    """What the queue would be if it served groups as they arrive."""

    def accept(self, group: Accepted) -> None:
        super().accept(group)
        line = {**self._window, **self._behind}
        arrived = sorted((entry for entry in line.values() if entry), key=lambda entry: entry.accepted_s)
        waiting = [group_id for group_id, entry in line.items() if entry is None]
        self._window, self._behind = {}, OrderedDict({**{e.group_request.group_id: e for e in arrived}, **dict.fromkeys(waiting)})
        self._accepted, self._accepted_behind = 0, len(arrived)
        self._fill_window()


@pytest.mark.parametrize("ordered", [True, False])
def test_order_of_arrival_would_break_the_bound(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ordered:
        monkeypatch.setattr("agentrl.flow.state.GroupQueue", ArrivalQueue)
    slow = ScriptedWorker(duration=lambda group_request: 40.0 if group_request.group_id == 3 else 1.0)
    scene = Scene(flow_of(num_steps=30, groups_per_step=4, n_samples_per_prompt=2, max_staleness=1), workers=[slow])
    if ordered:
        scene.run()
        assert max(row["staleness/max"] for row in scene.observer.steps) == 1
    else:
        with pytest.raises(StalenessError, match="group 3 holds tokens of versions 0"):
            scene.run()
