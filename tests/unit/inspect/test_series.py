"""Metrics as columns: what a curve and the list of steps show."""

from __future__ import annotations

import json
import threading

import pytest

from agentrl.inspect.series import MetricTable, series, step_rows


def test_long_curves_are_thinned_without_losing_what_stands_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "a": i == 333, "b": None, "tokens": 2}) + "\n" for i in range(1, 1001))
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1001, "late": 5.0}) + "\n")
    table = MetricTable(tmp_path)
    table.advance()
    answer = series(table, ["late"], 100)
    assert (answer["of"], len(answer["axes"]["step"]), answer["axes"]["step"][-1], answer["columns"]["late"][-1]) == (1001, 91, 1001.0, 5.0)
    assert answer["axes"]["tokens"][-1] == 2000.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "a": float(i == 333)}) + "\n" for i in range(1, 1001)))
    table.advance()
    answer = series(table, points=100)
    place = answer["high"]["a"].index(1.0)
    assert answer["from"][place] <= 333 <= answer["axes"]["step"][place]
    assert (answer["columns"]["a"][place], answer["low"]["a"][place]) == (pytest.approx(0.1), 0.0)
    assert series(table, points=1000)["high"] is None


def test_threads_that_read_at_once_take_every_row_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "a": step}) + "\n" for step in range(1, 20_001)))
    table = MetricTable(tmp_path)
    threads = [threading.Thread(target=table.advance) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.steps == list(range(1, 20_001))
    assert table.column("a") == table.steps


def test_rows_of_steps_count_what_was_filtered_in_each(tmp_path):
    rows = [{"step": step, "reward/mean": 0.5, "ledger/filtered": filtered} for step, filtered in ((1, 2), (2, 2), (3, 7))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = MetricTable(tmp_path)
    table.advance()
    assert [row["filtered"] for row in step_rows(table)["rows"]] == [2, 0, 5]
    assert [row["filtered"] for row in step_rows(table, offset=2)["rows"]] == [5]
