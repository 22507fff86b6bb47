from __future__ import annotations

from typing import Any

from agentrl.tune.objectives import count_losses
from agentrl.tune.row_text import IGNORED
from agentrl.tune.trainer import Collator

PAD = 99


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: lists(value) if isinstance(value, dict) else value.tolist() for name, value in batch.items()}


def test_rows_are_padded_at_their_end():
    batch = Collator(PAD)([{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}])
    assert lists(batch) == {
        "input_ids": [[1, 2, 3], [4, 5, PAD]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[IGNORED, 2, 3], [4, 5, IGNORED]],
    }
    assert count_losses(batch) == 3  # nothing predicts the first token of a row


def test_labels_of_steps_may_be_probabilities():
    batch = Collator(PAD)([{"input_ids": [1, 2, 3], "labels": [IGNORED, IGNORED, 0.25]}, {"input_ids": [4, 5], "labels": [IGNORED, 1.0]}])
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 0.25], [IGNORED, 1.0, IGNORED]]


def test_chosen_answers_come_before_rejected_ones_and_a_missing_margin_is_zero():
    rows = [
        {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4], "margin": 2.0},
        {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]},
    ]
    batch = Collator(PAD)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 6, 7], [1, 4, PAD], [5, 6, 8]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [IGNORED, IGNORED, 7], [IGNORED, 4, IGNORED], [IGNORED, IGNORED, 8]]
    assert batch["margin"].tolist() == [2.0, 0.0]
    assert count_losses(batch) == 2


def test_a_labelled_answer_comes_again_behind_the_next_prompt():
    rows = [{"prompt_ids": [number], "completion_ids": [10 + number], "label": number > 1} for number in (1, 2, 3)]
    batch = Collator(PAD)(rows)
    assert batch["input_ids"].tolist() == [[1, 11], [2, 12], [3, 13]]
    assert batch["mismatched"]["input_ids"].tolist() == [[1, 13], [2, 11], [3, 12]]
    assert batch["desirable"].tolist() == [False, True, True]
    assert count_losses(batch) == 3


def test_packed_rows_are_one_sequence_in_which_positions_start_again():
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [2, 1]},
        {"input_ids": [4, 5], "labels": [IGNORED, 5], "seq_lengths": [2]},
    ]
    batch = Collator(PAD)(rows)
    assert lists(batch) == {
        "input_ids": [[1, 2, 3, 4, 5]],
        "labels": [[IGNORED, 2, IGNORED, IGNORED, 5]],
        "position_ids": [[0, 1, 0, 0, 1]],
    }
    assert count_losses(batch) == 2
