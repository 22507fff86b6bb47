from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agentrl.config.tune import PairsDataConfig, TuneConfig, TuneEvalConfig, TuneRunConfig
from agentrl.core.errors import ConfigError, DataError
from agentrl.tune.data import drawing_order, epoch_size, held_out_of
from tests.unit.tune.plans import examples_of, num_trained


def pairs(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "chosen": "a", "rejected": "b"}) + "\n" for i in range(count)))
    return str(path)


def config(seed: int = 0, **data: object) -> TuneConfig:
    return TuneConfig(run=TuneRunConfig(seed=seed), data=PairsDataConfig(**data))  # type: ignore[arg-type]


def test_a_bad_row_is_named_by_file_line_and_column(tmp_path: Path):
    path = tmp_path / "pairs.jsonl"
    pairs(path, 2)
    with path.open("a") as file:
        file.write('{"prompt": "x", "chosen": "a"}\n')
    with pytest.raises(DataError) as caught:
        examples_of(config(data=str(path)), "pairs")
    assert str(caught.value) == f"--data = {str(path)!r}: line 3: column 'rejected' is missing. Its columns are prompt, chosen."


def test_a_row_that_is_no_json_is_named_by_its_line(tmp_path: Path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}\nhello\n")
    with pytest.raises(DataError, match="line 1: column 'chosen' is missing"):
        examples_of(config(data=str(path)), "pairs")
    path.write_text("hello\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        examples_of(config(data=str(path)), "pairs")


def test_held_out_rows_follow_from_the_seed_and_are_not_trained(tmp_path: Path):
    source = pairs(tmp_path / "a.jsonl", 20)
    first, again, other = (examples_of(config(seed, data=source, eval_size=5), "pairs") for seed in (0, 0, 1))
    assert first == again
    assert first.held_out != other.held_out
    assert (len(first.held_out), num_trained(first)) == (5, 15)
    assert not set(map(repr, first.held_out)) & set(map(repr, first.parts[0]))
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        examples_of(config(data=source, eval_size=20), "pairs")


def test_one_of_a_hundred_rows_is_held_out_where_nothing_is_said(tmp_path: Path):
    assert [held_out_of(size) for size in (0, 199, 200, 1999, 2100, 50_000)] == [0, 0, 20, 20, 21, 500]
    found = examples_of(config(data=pairs(tmp_path / "a.jsonl", 250)), "pairs")
    assert (len(found.held_out), num_trained(found)) == (20, 230)
    few = pairs(tmp_path / "b.jsonl", 20)
    assert not examples_of(config(data=few), "pairs").held_out
    asked = TuneConfig(data=PairsDataConfig(data=few), eval=TuneEvalConfig(keep_best="loss"))
    with pytest.raises(ConfigError, match=r"of 20 rows none is held out unless you say so\. Add --eval-size N"):
        examples_of(asked, "pairs")


def test_rows_to_evaluate_on_may_be_named(tmp_path: Path):
    train, other = pairs(tmp_path / "a.jsonl", 6), pairs(tmp_path / "b.jsonl", 4)
    found = examples_of(config(data=train, eval_data=other), "pairs")
    assert (num_trained(found), len(found.held_out)) == (6, 4)
    assert len(examples_of(config(data=train, eval_data=other, eval_size=3), "pairs").held_out) == 3


def test_sources_are_held_out_by_their_weights(tmp_path: Path):
    sources = f"{pairs(tmp_path / 'a.jsonl', 40)},{pairs(tmp_path / 'b.jsonl', 40)}"
    found = examples_of(config(data=sources, data_probs="3,1", eval_size=8), "pairs")
    assert [len(part) for part in found.parts] == [34, 38]
    assert num_trained(examples_of(config(data=sources), "pairs")) == 80


def test_an_epoch_is_every_row_once_in_an_order_of_the_seed():
    settings = config(data="x")
    order = drawing_order([10], 25, settings.data, 0)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert order == drawing_order([10], 25, settings.data, 0)
    assert order != drawing_order([10], 25, settings.data, 1)
    assert order[:7] == drawing_order([10], 7, settings.data, 0)  # a longer run begins in the same way
    assert drawing_order([4], 6, PairsDataConfig(shuffle=False), 0) == [0, 1, 2, 3, 0, 1]


def test_rows_are_drawn_in_the_proportions_of_their_sources():
    settings = config(data="a,b", data_probs="0.75,0.25")
    drawn = Counter(index >= 100 for index in drawing_order([100, 100], 80, settings.data, 0))
    assert drawn == {False: 60, True: 20}
    assert epoch_size([100, 100], settings.data, 0) == 133  # the first source is drawn whole
