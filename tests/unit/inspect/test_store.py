"""Files that grow while they are read, and the tables made of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.inspect.listing import run_answer
from agentrl.inspect.reader import RunReader
from agentrl.inspect.tail import Tail
from tests.run_files import MadeRun, small_run


class Seen:
    """What a tail handed over."""

    def __init__(self, path):
        self.lines, self.forgotten = [], 0
        self.tail = Tail(path, self.take, self.forget)

    def take(self, lines):
        self.lines += [(start, line.decode()) for start, line in lines]

    def forget(self):
        self.lines.clear()
        self.forgotten += 1

    def all(self, most=2**20):
        while not self.tail.advance(most):
            pass
        return [line for _, line in self.lines]


@given(texts=st.lists(st.text("ab\n", max_size=9), max_size=20), most=st.integers(1, 30))
def test_whole_lines_come_once_each_however_the_file_grew(tmp_path_factory, texts, most):
    path = tmp_path_factory.mktemp("t") / "file"
    seen, written = Seen(path), ""
    for text in texts:
        with path.open("a") as file:
            file.write(text)
        written += text
        seen.all(most)
    whole = written[: written.rfind("\n") + 1].split("\n")[:-1] if "\n" in written else []
    assert seen.all(most) == [line for line in whole if line.strip()]
    for start, line in seen.lines:
        assert written[start : start + len(line) + 1] == line + "\n"


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "file"
    seen = Seen(path)
    assert seen.all() == []
    path.write_text("one\ntw")
    assert (seen.all(), seen.tail.done) == (["one"], True)
    path.write_text("one\ntwo\n")
    assert seen.all() == ["one", "two"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_was_cut_or_replaced_is_read_again(tmp_path, replace):
    path = tmp_path / "file"
    path.write_text("one\ntwo\n")
    seen = Seen(path)
    seen.all()
    if replace:
        (tmp_path / "new").write_text("three\nfour\nfive\n")
        (tmp_path / "new").rename(path)
    else:
        path.write_text("six\n")
    assert (seen.all(), seen.forgotten) == ((["three", "four", "five"] if replace else ["six"]), 1)
    path.unlink()
    assert (seen.all(), seen.forgotten) == ([], 2)


def counts(run):
    return [run.store.one(f"SELECT count(*) FROM {table}") for table in ("episodes", "groups", "steps", "members", "annotations")]


def test_the_tables_are_the_same_with_an_index_and_without(tmp_path):
    one = RunReader(small_run(tmp_path / "one")).open()
    other = RunReader(small_run(tmp_path / "other", indexed=False)).open()
    assert counts(one) == counts(other) == [36, 9, 3, 6, 16]
    tables = ("episodes", "groups", "steps", "members", "annotations")
    assert [one.store.query(f"SELECT * FROM {table}") for table in tables] == [
        other.store.query(f"SELECT * FROM {table}") for table in tables
    ]
    assert one.store.progress == {
        "done": True,
        **{name: (tmp_path / "one" / "trajectories.jsonl").stat().st_size for name in ("bytes", "of")},
    }


def test_an_index_that_is_behind_is_continued_from_the_records(tmp_path):
    path = small_run(tmp_path / "run")
    index = path / "trajectories.index.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:6]))
    run = RunReader(path).open(seconds=0.0)
    while not run.store.advance():
        pass
    assert counts(run)[0] == 36
    assert run.store.query("SELECT name FROM episodes") == RunReader(small_run(tmp_path / "new")).open().store.query(
        "SELECT name FROM episodes"
    )


def test_what_a_running_run_writes_is_added(tmp_path):
    made = MadeRun(tmp_path / "run")
    made.step(1, [made.group(1)])
    run = RunReader(tmp_path / "run").open()
    before = counts(run)
    made.step(2, [made.group(2), made.group(2)])
    while not run.store.advance():
        pass
    assert (before, counts(run)) == ([4, 1, 1, 1, 4], [12, 3, 2, 3, 12])


def test_a_run_that_was_taken_back_to_a_checkpoint_is_read_again(tmp_path):
    from agentrl.api.rewinding import rewind_records
    from agentrl.flow.checkpoint import Progress

    path = small_run(tmp_path / "run")
    run = RunReader(path).open()
    rewind_records(path, Progress(step=1, next_group_id=4, open_groups=((3, 0, 3),)))  # the third group is to be played again
    while not run.store.advance():
        pass
    run.metrics.advance()
    assert [row[0] for row in run.store.query('SELECT DISTINCT "group" FROM episodes ORDER BY 1')] == [0, 1, 2]
    assert [row[0] for row in run.store.query("SELECT DISTINCT step FROM annotations")] == [1]
    assert (counts(run)[1:3], run.metrics.steps) == ([3, 1], [1])
    assert not (path / "trajectories.index.jsonl").exists()


def test_halves_of_characters_do_not_keep_a_record_out(tmp_path):
    path = small_run(tmp_path / "run", indexed=False)
    strange = {"trajectory_id": "x\ud800", "task": {"id": "\udc00"}, "error": "\ud800", "turns": [{"text": "\ud83d"}]}
    with (path / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n")
    assert RunReader(path).open().store.query("SELECT name, task, error, text FROM episodes WHERE id = 37") == [("x?", "?", "?", "?")]


def test_lines_that_are_no_json_are_named_and_left_out(tmp_path):
    path = small_run(tmp_path / "run", indexed=False)
    with (path / "trajectories.jsonl").open("a") as file:
        file.write("no JSON\n" + json.dumps({"trajectory_id": "x"}) + "\n")
    run = RunReader(path).open()
    assert counts(run)[0] == 37
    assert run.store.unreadable == [("trajectories.jsonl", (path / "trajectories.jsonl").stat().st_size - len("no JSON") - 24)]
    assert run_answer(run, "run")["problems"] == [f"{name}, byte {start}" for name, start in run.store.unreadable]
    assert run.directory.unreadable_records() == ["trajectories.jsonl, line 37"]
