"""The learner's figures of recorded tokens: what they are, against plain models and formulas, and that training is the same with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.core.annotations import MASKS, Annotation, Mask, read_annotation
from agentrl.core.errors import StorageError
from agentrl.core.types import Group, Turn, floats
from agentrl.learner.annotations import Annotator, append, recorded_trajectories
from agentrl.learner.batch import collate, merge_turns
from agentrl.learner.learner import LearnerRank
from agentrl.learner.targets import UpdateTargets
from agentrl.resolve.parts import learner_plan
from tests.learner_support import CollectingSender, largest_difference, make_groups, make_settings, row_scores

EVERY = 100


def recorded(groups: tuple[Group, ...], record: int) -> tuple[Group, ...]:
    """The groups, of which so many episodes are recorded."""
    return tuple(replace(group, record=record) for group in groups)


def run(
    model: str, path: Path | None, groups: tuple[Group, ...] | None = None, *, record: int = EVERY, steps: int = 1, **changes: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, Annotation]]:
    """Weights and metrics of some steps, and the annotations of the last one by trajectory."""
    settings = replace(make_settings(model, **changes), annotations=path)
    learner = LearnerRank(settings, CollectingSender())
    learner.start(0, 1, 0)
    played = [recorded(groups or make_groups(seed=step, version=step), record) for step in range(steps)]
    metrics = [learner.train(step, *groups).metrics for step, groups in enumerate(played)]
    weights = {name: tensor.detach().clone() for name, tensor in learner._started.named_weights()}
    learner.close()
    return weights, metrics, annotations(path, steps) if path is not None else {}


def annotations(path: Path, step: int) -> dict[str, Annotation]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [read_annotation(row) for row in rows if row["step"] == step]
    return {item.trajectory_id: item for item in found if item is not None}


def masks_of(found: dict[str, Annotation]) -> list[Mask]:
    return [MASKS[number] for item in found.values() for number in item.masks]


@pytest.mark.parametrize(
    "algo",
    [
        {},
        {"ppo_epochs": 2, "mini_batches": 2, "off_policy": "icepop", "policy_loss": "gspo"},
        {"advantage_estimator": "gae", "init_kl_coef": 0.1, "use_kl_loss": True, "entropy_coef": 0.01},
    ],
)
def test_training_is_bit_for_bit_the_same(tiny_model: str, tmp_path: Path, algo: dict[str, Any]) -> None:
    plain, before, _ = run(tiny_model, None, steps=2, algo=algo)
    noted, after, found = run(tiny_model, tmp_path / "a.jsonl", steps=2, algo=algo)
    assert largest_difference(plain, noted) == 0.0
    assert len(found) == 12
    for one, other in zip(before, after, strict=True):
        timed = {name for name in other if name.startswith("time/")}
        assert {name: other[name] for name in other.keys() - timed} == {name: one[name] for name in one.keys() - timed}


def test_figures_are_those_of_a_plain_model_and_of_the_formulas(tiny_model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    groups = make_groups(3, 4, version=0)
    algo = {"advantage_estimator": "group_norm", "off_policy": "tis", "loss_aggregation": "token-mean"}
    _, [metrics], found = run(tiny_model, tmp_path / "a.jsonl", groups, algo=algo)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    total, count = 0.0, sum(t.num_tokens for group in groups for t in group.trajectories)
    for group in groups:
        rewards = np.array([t.reward for t in group.trajectories])
        for trajectory in group.trajectories:
            item = found[trajectory.trajectory_id]
            with torch.no_grad():
                scores = [row_scores(plain, row) for row in merge_turns(trajectory)]
            ids = np.concatenate([turn.token_ids for turn in trajectory.turns]).astype(np.int64)
            table = torch.cat(scores)
            logprobs = table[torch.arange(len(ids)), torch.from_numpy(ids)]
            behaviour = np.concatenate([turn.logprobs for turn in trajectory.turns])
            np.testing.assert_allclose(item.figures["logprob"], logprobs, atol=2e-4)
            np.testing.assert_allclose(item.figures["entropy"], -(table.exp() * table).sum(-1), atol=2e-4)
            np.testing.assert_allclose(item.figures["weight"], np.minimum(np.exp(logprobs - behaviour), 2.0), rtol=1e-3)
            np.testing.assert_allclose(item.figures["ratio"], 1.0)
            advantage = (trajectory.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(item.figures["advantage"], advantage, rtol=2e-3)
            expected = -item.figures["weight"] * item.figures["advantage"] / count
            np.testing.assert_allclose(item.figures["loss"], expected, rtol=1e-4, atol=1e-7)
            total += float(item.figures["loss"].sum())
            assert set(masks_of({"": item})) == {Mask.TRAINED}
    assert total == pytest.approx(metrics["loss/policy"], abs=1e-5)


def test_only_the_recorded_episodes_of_each_group_are_written(tiny_model: str, tmp_path: Path) -> None:
    _, _, found = run(tiny_model, tmp_path / "a.jsonl", make_groups(4, 3), record=1)
    assert sorted(found) == ["0-0", "1-0", "2-0", "3-0"]
    assert recorded_trajectories(recorded(make_groups(1, 3), 2)) == {"0-0", "0-1"}


def shifted(groups: tuple[Group, ...], by: float) -> tuple[Group, ...]:
    """The groups with every other behaviour log-probability lower by so much."""

    def turn(item: Turn) -> Turn:
        return replace(item, logprobs=floats(item.logprobs - by * (np.arange(len(item.logprobs)) % 2)))

    changed = [tuple(replace(t, turns=tuple(map(turn, t.turns))) for t in group.trajectories) for group in groups]
    return tuple(replace(group, trajectories=trajectories) for group, trajectories in zip(groups, changed, strict=True))


def test_tokens_that_the_correction_removes_say_so(tiny_model: str, tmp_path: Path) -> None:
    groups = shifted(make_groups(), 30.0)
    _, [metrics], found = run(tiny_model, tmp_path / "a.jsonl", groups, algo={"off_policy": "icepop"})
    names = masks_of(found)
    weights = np.concatenate([item.figures["weight"] for item in found.values()])
    assert [name is Mask.OFF_POLICY for name in names] == (weights == 0.0).tolist()
    assert names.count(Mask.OFF_POLICY) / len(names) == pytest.approx(metrics["off_policy/masked"], abs=1e-6)
    assert 0 < names.count(Mask.OFF_POLICY) < len(names)


def test_tokens_of_low_entropy_say_so(tiny_model: str, tmp_path: Path) -> None:
    _, [metrics], found = run(tiny_model, tmp_path / "a.jsonl", algo={"top_entropy_share": 0.25, "off_policy": "none"})
    names = masks_of(found)
    assert names.count(Mask.TRAINED) / len(names) == pytest.approx(metrics["policy/high_entropy"], abs=0.01)
    entropies = np.concatenate([item.figures["entropy"] for item in found.values()])
    trained = np.array([name is Mask.TRAINED for name in names])
    assert entropies[trained].min() >= entropies[~trained].max()
    assert all((item.figures["loss"] == 0.0)[item.masks != MASKS.index(Mask.TRAINED)].all() for item in found.values())


def test_tokens_that_the_loss_clips_say_so(tiny_model: str, tmp_path: Path) -> None:
    algo = {"ppo_epochs": 3, "eps_clip_low": 0.01, "eps_clip_high": 0.01, "off_policy": "none"}
    _, _, found = run(tiny_model, tmp_path / "a.jsonl", algo=algo)
    ratio, advantage = (np.concatenate([item.figures[name] for item in found.values()]) for name in ("ratio", "advantage"))
    clipped = ((ratio > 1.01) & (advantage > 0)) | ((ratio < 0.99) & (advantage < 0))
    assert [name is Mask.CLIPPED for name in masks_of(found)] == clipped.tolist()
    assert 0 < clipped.sum() < len(clipped)


def test_the_policy_waits_while_the_critic_warms_up(tiny_model: str, tmp_path: Path) -> None:
    changes = {"algo": {"advantage_estimator": "gae"}, "learner": {"critic_warmup_steps": 1}}
    _, _, found = run(tiny_model, tmp_path / "a.jsonl", **changes)
    item = found["0-0"]
    assert set(masks_of(found)) == {Mask.WARMUP}
    assert {"logprob", "advantage", "value", "return"} <= item.figures.keys()
    assert "ratio" not in item.figures


def test_an_update_that_is_skipped_is_told(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner.engine import TrainEngine

    monkeypatch.setattr(TrainEngine, "update", lambda engine, rate: None)
    _, _, found = run(tiny_model, tmp_path / "a.jsonl", algo={"off_policy": "none"})
    assert set(masks_of(found)) == {Mask.SKIPPED}


@dataclass(frozen=True)
class TwoRanks:
    """One of two ranks; the second sums first, and the first adds what the second had."""

    rank: int
    shared: list[torch.Tensor] = field(default_factory=list)
    leads: bool = True

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank:
            self.shared.append(tensor)
            return tensor
        return tensor + self.shared.pop()


def test_the_first_rank_writes_what_each_rank_trained(tmp_path: Path) -> None:
    groups = make_groups(2, 2)
    batch = collate(groups)
    names, places = recorded_trajectories(recorded(groups, EVERY)), torch.arange(batch.num_actions)
    shared: list[torch.Tensor] = []
    written = {}
    for rank in (1, 0):
        annotator = Annotator(batch, names, TwoRanks(rank, shared), tmp_path / f"{rank}.jsonl")  # type: ignore[arg-type]
        at = places[batch.row % 2 == rank]  # rows are spread over ranks
        micro: Any = type("Micro", (), {"actions": at})
        ones = torch.ones(len(at))
        figures = (ones, ones * 2, at * 1.0)
        annotator.take(micro, first=True, entropy=at * 0.5, new=-at * 1.0, figures=figures, clipped=at % 3 == 0)
        signals = UpdateTargets(advantages=places * 0.1)
        annotator.write(7, signals, behaviour_is_old=False)
        written[rank] = annotations(tmp_path / f"{rank}.jsonl", 7) if (tmp_path / f"{rank}.jsonl").exists() else {}
    assert written[1] == {}
    assert sorted(written[0]) == sorted(names)
    joined = {name: np.concatenate([item.figures[name] for item in written[0].values()]) for name in ("logprob", "loss", "entropy")}
    np.testing.assert_array_equal(joined["logprob"], -np.arange(batch.num_actions))
    np.testing.assert_array_equal(joined["loss"], np.arange(batch.num_actions))
    np.testing.assert_array_equal(joined["entropy"], np.arange(batch.num_actions) * 0.5)
    assert [name is Mask.CLIPPED for name in masks_of(written[0])] == [place % 3 == 0 for place in range(batch.num_actions)]


def test_a_masked_branch_has_no_figures(tiny_model: str, tmp_path: Path) -> None:
    [group] = make_groups(1, 2)
    first = group.trajectories[0]
    own = replace(first.turns[0], fresh=True, masked="its answer was not read", number=9)
    changed = replace(group, trajectories=(replace(first, turns=(*first.turns, own)), group.trajectories[1]))
    _, _, found = run(tiny_model, tmp_path / "a.jsonl", (changed,))
    assert len(found["0-0"].masks) == first.num_tokens


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    item = Annotation(trajectory_id="a", step=1, figures={}, masks=np.zeros(1, np.uint8))
    with pytest.raises(StorageError, match=r"nowhere.*cannot be written"):
        append(tmp_path / "nowhere" / "a.jsonl", iter([item]))


def test_the_flag_and_the_records_decide(tmp_path: Path) -> None:
    from agentrl.cluster.plan import RunConfig
    from agentrl.config.schema import TrainConfig
    from agentrl.flow.plan import TrainingConfig
    from agentrl.track.plan import RecordConfig

    config = TrainConfig(run=RunConfig(agent="a.py"), training=TrainingConfig(run_dir=tmp_path))
    places = {
        (record, annotate): learner_plan(replace(config, record=RecordConfig(record=record, annotate=annotate)), "cpu")
        for record in ("none", "sample", "budget", "all")
        for annotate in (True, False)
    }
    written = {key for key, settings in places.items() if settings.annotations == tmp_path / "annotations.jsonl"}
    assert written == {("sample", True), ("budget", True), ("all", True)}
