"""The index beside the records: it says where each one is, and is not believed where it does not fit."""

from __future__ import annotations

import json

import pytest

from agentrl.core.errors import StorageError
from agentrl.core.types import Status
from agentrl.inspect.reader import RunReader
from agentrl.track.index import COLUMNS, IndexWriter, index_path, parsed, read_index, row_of, scan_records, write_index
from agentrl.track.jsonl import JsonLines
from agentrl.track.sinks import TrajectoryRecorder
from tests.run_files import MadeRun, small_run


@pytest.fixture
def records(tmp_path):
    return small_run(tmp_path / "run") / "trajectories.jsonl"


def at(records, values):
    with records.open("rb") as file:
        file.seek(values[0])
        return parsed(file.read(values[1]))


def test_every_record_is_where_its_line_says(records):
    found = list(read_index(records))
    names = [json.loads(line)["trajectory_id"] for line in records.read_text().splitlines()]
    assert [values[COLUMNS.index("name")] for values in found] == names
    assert [at(records, values)["trajectory_id"] for values in found] == names
    assert found == list(scan_records(records))


def test_a_row_says_what_the_record_holds(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.group(3, members=1, turns=2, tokens=5, task="t", status=Status.ENV_ERROR)
    [values] = read_index(run.close() / "trajectories.jsonl")
    row = dict(zip(COLUMNS, values, strict=True))
    assert (row["episode"], row["group"], row["attempt"], row["step"], row["task"], row["source"]) == ("0-0-0", 0, 0, 3, "t", "train")
    assert (row["status"], row["turns"], row["tokens"], row["reward"], row["seconds"]) == ("env_error", 2, 10, None, 0.4)
    assert row["error"] == "RuntimeError: the tool broke"


def test_rows_of_strange_records():
    assert row_of({}).status == "cut"
    strange = row_of({"turns": ["x", {"text": 5}], "task": 3, "reward": "much", "version": "new", "eval_sampling": {"name": "eval-3"}})
    assert (strange.turns, strange.task, strange.reward, strange.step, strange.source, strange.text) == (1, "?", None, 1, "eval-3", "5")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"prompt": " How much? ", "label": 3}, ("How much?", "3", "int")),
        ({"prompt": [{"role": "user", "content": "first"}, {"role": "user", "content": "last"}], "label": "3"}, ("last", "3", "str")),
        ({"prompt": [{"content": [{"type": "image"}, {"type": "text", "text": "see"}]}], "label": [1, 2]}, ("see", "[1, 2]", "list")),
        ({"prompt": None, "label": None}, ("", "", "")),
        ({"prompt": "p", "label": [1, 2], "literals": {"label": "(1, 2)"}}, ("p", "(1, 2)", "tuple")),
        ({"prompt": "x" * 999, "label": True}, ("x" * 200, "true", "bool")),
    ],
)
def test_rows_show_the_prompt_and_the_label_with_its_type(task, expected):
    row = row_of({"task": {"id": "t", **task}})
    assert (row.prompt.strip(), row.label, row.label_type) == expected


def test_an_index_without_prompts_is_read_and_written_anew_when_the_run_goes_on(records):
    """As one that an earlier version wrote."""
    whole = list(read_index(records))
    head, *rows = (json.loads(line) for line in index_path(records).read_text().splitlines())
    head["columns"] = head["columns"][:-3]
    index_path(records).write_text("".join(json.dumps(line) + "\n" for line in (head, *(row[:-3] for row in rows))))
    assert list(read_index(records)) == [[*values[:-3], "", "", ""] for values in whole]
    IndexWriter(records).close()
    assert list(read_index(records)) == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],  # cut by a crash
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"name"', '"title"'),
        lambda text: "",
        lambda text: "no JSON\n" + text,
    ],
)
def test_a_damaged_index_is_read_as_far_as_it_fits(records, damage):
    whole = list(read_index(records))
    path = index_path(records)
    path.write_text(damage(path.read_text()))
    found = list(read_index(records))
    assert found == whole[: len(found)]
    assert len(found) in (0, len(whole) - 1)


def test_an_index_ends_where_its_file_was_edited(records):
    first, second, *_ = records.read_text().splitlines(keepends=True)
    whole = list(read_index(records))
    records.write_text(first + "garbage\n" + second)
    assert list(read_index(records)) == whole[:1]


def test_an_index_of_a_file_that_was_cut_back_ends_with_it(records):
    whole = list(read_index(records))
    with records.open("r+b") as file:
        file.truncate(whole[10][0] + 3)
    assert list(read_index(records)) == whole[:10]


def test_a_run_that_goes_on_after_its_records_were_cut_back_has_a_whole_index(records, group):
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:7]))
    recorder = TrajectoryRecorder(records)
    recorder.write(group(records=({"trajectory_id": "new", "text": "é"},)))
    recorder.close()
    found = list(read_index(records))
    assert found == list(scan_records(records))
    assert (len(found), found[-1][COLUMNS.index("name")]) == (8, "new")


def test_an_index_without_its_records_is_begun_anew(records):
    records.unlink()
    IndexWriter(records).close()
    assert list(read_index(records)) == []
    assert len(index_path(records).read_text().splitlines()) == 1


def test_lines_that_are_no_records_are_left_out(tmp_path):
    records = tmp_path / "trajectories.jsonl"
    records.write_text('no JSON\n{"trajectory_id": "a"}\n[1]\n\n{"trajectory_id": "b"}\n{"trajectory_id": "cut')
    write_index(records, scan_records(records))
    assert [at(records, values) for values in read_index(records)] == [{"trajectory_id": "a"}, {"trajectory_id": "b"}]


def test_an_index_that_cannot_be_written_ends_no_run(records, group, monkeypatch, caplog):
    whole, recorder = list(read_index(records)), TrajectoryRecorder(records)
    write = JsonLines.write

    def full(lines, line):
        if line.startswith("["):
            raise StorageError("no space left")
        write(lines, line)

    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "write", full)
        recorder.write(group(records=({"trajectory_id": "new"},)))
    recorder.write(group(records=({"trajectory_id": "newer"},)))
    recorder.close()
    assert list(read_index(records)) == whole
    assert caplog.messages == ["no space left; the run goes on without its index"]
    assert RunReader(records.parent).open().store.query("SELECT name FROM episodes ORDER BY id")[-2:] == [("new",), ("newer",)]
