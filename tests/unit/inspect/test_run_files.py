"""Reading run directories, choosing episodes, exporting them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.core.errors import ConfigError
from agentrl.inspect.directory import RunDirectory
from agentrl.inspect.episodes import EpisodeTable, make_table, show_run, show_table
from agentrl.inspect.export import export
from agentrl.track.index import row_of
from agentrl.track.text import Screen


def record(index: int, **changes: Any) -> dict[str, Any]:
    turn = {
        "prompt_text": "q",
        "text": f"a{index}",
        "prompt_ids": [1],
        "token_ids": [2] * (index + 1),
        "logprobs": [-0.5] * (index + 1),
        "versions": [0] * (index + 1),
        "finish_reason": "stop",
        "fresh": False,
        "reward": float(index),
        "temperature": 1.0,
        "info": {},
    }
    name = f"{index // 2}-0-{index % 2}"
    return {
        "trajectory_id": name,
        "episode_id": name,
        "group_id": index // 2,
        "attempt": 0,
        "version": index // 4,
        "agent": "",
        "task": {"id": f"t{index % 3}", "epoch": 0, "position": index, "prompt": "q", "label": index, "metadata": {}},
        "status": "finished",
        "reward": float(index),
        "score": 1.0,
        "reward_parts": {},
        "metrics": {},
        "error": None,
        "turns": [turn],
        **changes,
    }


def write(folder: Path, *records: Any, tail: str = "") -> RunDirectory:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in records]
    (folder / "trajectories.jsonl").write_text("".join(f"{line}\n" for line in lines) + tail)
    return RunDirectory(folder)


def names(rows: Any) -> list[str]:
    return [row.name for row in rows]


def test_a_line_cut_off_by_a_crash_is_left_out_and_others_are_named(tmp_path: Path) -> None:
    run = write(tmp_path, record(0), "{broken", "[1]", "", record(1), tail='{"trajectory_id": "9-')
    assert [r["trajectory_id"] for r in run.records()] == ["0-0-0", "0-0-1"]
    assert run.unreadable == ["trajectories.jsonl, line 2", "trajectories.jsonl, line 3"]


def test_one_episode_or_one_group_is_found_without_parsing_the_rest(tmp_path: Path) -> None:
    run = write(tmp_path, record(0), "{broken", *(record(index) for index in range(1, 24)))
    assert [records[0]["trajectory_id"] for records in run.episodes("3-0-1")] == ["3-0-1"]
    assert [records[0]["trajectory_id"] for records in run.episodes("1")] == ["1-0-0", "1-0-1"]
    assert list(run.episodes("0-0")) == []
    assert run.unreadable == []


def test_the_agents_of_an_episode_are_read_together(tmp_path: Path) -> None:
    pair = [record(0, agent="ann", trajectory_id="0-0-0-ann"), record(0, agent="bob", trajectory_id="0-0-0-bob")]
    run = write(tmp_path, *pair, record(1))
    assert [[r["agent"] for r in records] for records in run.episodes()] == [["ann", "bob"], [""]]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    run = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match="--record all"):
        run.records()
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        run.config()
    with pytest.raises(ConfigError, match="is a file"):
        RunDirectory(tmp_path / "metrics.jsonl")
    assert run.summary() == {}
    assert run.metrics() == [{"step": 1}]


@pytest.mark.parametrize("limit", [0, 3, 100])
@pytest.mark.parametrize("sort", ["time", "-reward", "tokens", "task", "status", "-score", "turns"])
def test_the_first_rows_are_those_of_the_whole_order(tmp_path: Path, sort: str, limit: int) -> None:
    records = [record(index) for index in range(12)]
    records[5] = record(5, status="env_error", reward=None, score=None, error="broken")
    run = write(tmp_path, *records)
    table = make_table(run, {}, sort=sort, limit=limit)
    whole = make_table(run, {}, sort=sort, limit=0)
    assert names(table.rows) == names(whole.rows)[: limit or None]
    assert (table.seen, table.chosen, table.statuses["env_error"]) == (12, 12, 1)
    if sort == "-reward":
        assert [row.reward for row in whole.rows] == [11, 10, 9, 8, 7, 6, 4, 3, 2, 1, 0, None]


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"status": "env_error,timeout"}, [5]),
        ({"task": "t1"}, [1, 4, 7]),
        ({"started": 2}, [4, 5, 6, 7]),
        ({"min_reward": 3, "max_reward": 6}, [3, 4, 6]),
        ({"agent": "bob"}, [2]),
    ],
)
def test_choices(tmp_path: Path, chosen: dict[str, Any], kept: list[int]) -> None:
    records = [record(index) for index in range(8)]
    records[5] = record(5, status="env_error", reward=None, score=None)
    records[2] = record(2, agent="bob")
    assert names(make_table(write(tmp_path, *records), chosen).rows) == [records[index]["trajectory_id"] for index in kept]


@pytest.mark.parametrize("odd", [{}, {"clipped": True, "bytes": 9}, {"turns": [1, {}]}, {"task": None, "version": "x", "reward": "1"}])
def test_a_record_of_any_shape_has_a_row(odd: dict[str, Any]) -> None:
    assert row_of(odd).tokens == 0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_different_shapes_make_one_data_set(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    chat = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    odd = [
        record(0),
        record(1, task={**record(1)["task"], "label": {"a": [1]}, "prompt": chat, "metadata": {"kind": "x"}, "seed": 5}),
        record(2, reward=None, score=None, error="broken \ud800", status="env_error", turns=[], metrics={"m": 1.0}),
        record(3, clipped=True),
        {"clipped": True},
        record(4, task={**record(4)["task"], "label": None}),
    ]
    path = tmp_path / f"out.{suffix}"
    assert export(odd, path) == (4, 2)
    builder = "json" if suffix == "jsonl" else "parquet"
    rows = list(datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")))
    assert [row["trajectory_id"] for row in rows] == ["0-0-0", "0-0-1", "1-0-0", "2-0-0"]
    assert [json.loads(row["label"]) for row in rows] == [0, {"a": [1]}, 2, None]
    assert json.loads(rows[1]["prompt"][0]["content"]) == chat[0]["content"]
    assert (rows[2]["reward"], rows[2]["turns"], rows[1]["seed"]) == (None, [], 5)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_exports_that_cannot_be_written(tmp_path: Path) -> None:
    for name, told in (("out.csv", "unknown kind"), ("none/out.jsonl", "cannot be written")):
        with pytest.raises(ConfigError, match=told):
            export([record(0)], tmp_path / name)
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        export([record(0)], tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def shown(table: EpisodeTable, width: int) -> list[str]:
    """The lines of a table in a terminal of this width."""
    out = io.StringIO()
    show_table(Screen(Console(file=out, width=width, force_terminal=True, color_system=None)), table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_errors_stand_below_the_table_and_squeeze_no_column(tmp_path: Path, width: int) -> None:
    error = "env.py: Env.step raised ValueError: the board has no field 77, only those from 0 to 63\nTraceback ..."
    long = [{**record(3)["turns"][0], "text": "a long answer, " * 20}]
    records = [record(0, status="env_error", error=error), record(1, status="env_error", error=error), record(2), record(3, turns=long)]
    lines = shown(make_table(write(tmp_path, *records), {}), width)
    for name in ("0-0-0", "0-0-1", "1-0-0", "1-0-1"):
        (row,) = (line for line in lines if line.startswith(name + " "))
        assert row.split()[:4] == [name, "1", record(["0-0-0", "0-0-1", "1-0-0", "1-0-1"].index(name))["task"]["id"], row.split()[3]]
        assert row.split()[3] in ("env_error", "finished")
    below = " ".join(" ".join(lines[lines.index(next(line for line in lines if line.startswith("env_error"))) :]).split())
    assert "env_error 2 episodes, such as 0-0-0: env.py: Env.step raised ValueError: the board has no field 77" in below
    assert "Traceback" not in below


def test_an_interrupted_run_has_a_space_behind_its_status(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "time_s": 2.0}\n')
    (tmp_path / "summary.json").write_text('{"status": "interrupted"}')
    out = io.StringIO()
    show_run(RunDirectory(tmp_path), Screen(Console(file=out)))
    assert "interrupted  1 step in 2.0 s" in out.getvalue()
