"""Facts of ranks that need no second one: their shares, the cutting of a sequence, the settings and functions that they take."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.learner import ranks as meeting
from agentrl.learner import settings as sizes
from agentrl.learner.deepspeed import ranks as joining
from agentrl.learner.layout import MicroBatch
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.sequence import SequenceGroup
from agentrl.learner.targets import load_algorithm
from agentrl.resolve.parts import learner_plan
from tests.learner_support import algorithm, make_settings

CPU = torch.device("cpu")


def test_ranks_that_run_micro_batches_together_have_one_share_of_the_rows() -> None:
    ranks = [Ranks(rank, 12, CPU, sequence_parallel=3, tensor_parallel=2) for rank in range(12)]
    assert [rank.data_rank for rank in ranks] == [0] * 6 + [1] * 6
    assert {rank.data_size for rank in ranks} == {2}
    assert [rank.rank for rank in ranks if rank.leads] == [0, 6]
    assert [rank.rank for rank in ranks if rank.first] == [0]


def test_a_sum_over_ranks_leaves_its_tensor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2.0))
    own = torch.ones(2)
    assert Ranks(0, 2, CPU).sum(own).tolist() == [2.0, 2.0]
    assert own.tolist() == [1.0, 1.0]
    assert Ranks(0, 1, CPU).sum(own) is own


def test_a_process_group_is_taken_down_by_whoever_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import comm

    ended: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(comm, "destroy_process_group", lambda: ended.append(True))
    Ranks(0, 2, CPU, owner=False, end=joining._leave).leave()
    assert not ended
    Ranks(0, 2, CPU, end=joining._leave).leave()
    assert ended


def test_a_rank_tells_deepspeed_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(joining, "meet", lambda *_: None)
    monkeypatch.setattr(joining, "_prepare_deepspeed", lambda: None)
    given: dict[str, Any] = {"master_port": 7, "master_addr": "host", "device": "cpu", "timeout_s": 1.0}
    joining.join(5, 8, **given)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [joining.os.environ[name] for name in names] == ["5", "5", "8", "8", "host", "7"]
    joining.join(5, 8, place=(1, 4), **given)
    assert [joining.os.environ[name] for name in names] == ["5", "1", "8", "4", "host", "7"]


def test_the_meeting_point_listens_on_loopback_only() -> None:
    listener = socket.socket(fileno=meeting._loopback_listener(0))
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def packed(length: int, **more: Any) -> MicroBatch:
    """A row, in which the tokens at places 2 and later are actions."""
    select = torch.arange(1, length)
    return MicroBatch(
        input_ids=torch.arange(10, 10 + length)[None],
        real=torch.ones(length, dtype=torch.bool),
        position_ids=None,
        select=select,
        targets=select + 10,
        temperature=select / 10.0,
        actions=select - 1,
        packed=True,
        num_tokens=length,
        num_row_tokens=length,
        **more,
    )


def test_every_rank_of_a_sequence_has_its_tokens_and_what_they_predict() -> None:
    micro = packed(5, experts=torch.zeros(5, 1, 2, dtype=torch.int16), bounds=torch.tensor([0, 5], dtype=torch.int32), longest=5)
    parts = [SequenceGroup(2, rank, None).cut(micro) for rank in range(2)]  # type: ignore[arg-type]
    assert [inputs["input_ids"].tolist() for _, inputs, _ in parts] == [[[10, 11, 12]], [[13, 14, 0]]]
    assert [inputs["position_ids"].tolist() for _, inputs, _ in parts] == [[[0, 1, 2]], [[3, 4, 0]]]
    assert [mine.tolist() for _, _, mine in parts] == [[True, True, False, False], [False, False, True, True]]
    assert [part.select.tolist() for part, _, _ in parts] == [[1, 2], [0, 1]]
    assert [part.targets.tolist() for part, _, _ in parts] == [[11, 12], [13, 14]]
    assert [len(part.temperature) for part, _, _ in parts] == [2, 2]
    assert [part.real.tolist() for part, _, _ in parts] == [[True] * 3, [True, True, False]]
    assert parts[1][1]["cu_seq_lens_q"].tolist() == [0, 5, 6]  # the padding is a row of its own
    assert parts[1][0].experts is not None
    assert parts[1][0].experts[-1].tolist() == [[-1, -1]]  # and its router is free


def test_a_sequence_is_padded_to_a_multiple_of_the_ranks() -> None:
    lengths = [SequenceGroup(3, 0, None)._padded(packed(length)).input_ids.shape[1] for length in (4, 5, 6)]  # type: ignore[arg-type]
    assert lengths == [6, 6, 6]


def test_padding_sees_itself_and_no_tree() -> None:
    whole = SequenceGroup(2, 0, None)._padded(packed(5, ends=torch.tensor([[5, 5, 4, 4, 5]])))  # type: ignore[arg-type]
    assert whole.ends is not None
    assert whole.ends.tolist() == [[5, 5, 4, 4, 5, 6]]


def test_a_gradient_goes_to_the_scores_that_a_rank_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(torch.tensor([5.0, 0.0, 0.0, 7.0])))
    own = torch.tensor([1.0, 2.0], requires_grad=True)
    found = SequenceGroup(2, 0, None).gather(own, torch.tensor([False, True, True, False]))  # type: ignore[arg-type]
    assert found.tolist() == [5.0, 1.0, 2.0, 7.0]
    (found * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == [10.0, 100.0]


def test_several_numbers_of_each_place_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score with the likeliest tokens beside it, or logits of several labels; the other rank has the last two places."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor[2:].add_(torch.tensor([[5.0, 6.0], [7.0, 8.0]])))
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    found = SequenceGroup(2, 0, None).gather(own, torch.tensor([True, True, False, False]))  # type: ignore[arg-type]
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    (found * torch.arange(8.0).view(4, 2)).sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_rows_of_a_chunk() -> None:
    assert sizes.chunk_rows(2**16) == 1024
    assert sizes.chunk_rows(2**20) == sizes.MIN_ROWS


def test_bfloat16_is_trained_with_zero_and_other_stages_stay() -> None:
    def stage(zero_stage: int, dtype: Any, device: Any = "cpu") -> int:
        learner = LearnerConfig(zero_stage=zero_stage, learner_dtype=dtype)
        return replace(make_settings("model"), learner=learner, device=device).learner.zero_stage

    assert [stage(0, "bfloat16"), stage(3, "bfloat16"), stage(0, "float32"), stage(0, "auto"), stage(0, "auto", "cuda")] == [1, 3, 0, 0, 1]


def test_settings_of_a_run_reach_the_learner(tmp_path: Path) -> None:
    config = changed(TrainConfig(), num_steps=17, max_new_tokens=5, seed=3, run_dir=tmp_path, record="none", annotate=True)
    found = learner_plan(config, "cpu")
    assert (found.num_steps, found.max_new_tokens, found.seed, found.annotations) == (17, 5, 3, None)


def test_the_options_of_an_algorithm_are_those_that_were_given() -> None:
    found = load_algorithm(algorithm(advantage_std_norm=False, eps_clip_high=0.4, off_policy_range=(0.0, 3.0)))
    assert not found.estimator_options.advantage_std_norm
    assert found.loss_options.eps_clip_high == 0.4
    assert found.correction_options.off_policy_range == (0.0, 3.0)
