"""Sample trajectories on disk."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.types import Status
from agentrl.track.sinks import TrajectoryRecorder, clip, encode_capped


def test_every_record_of_a_group_is_one_line(tmp_path, group):
    recorder = TrajectoryRecorder(tmp_path / "t.jsonl", clock=lambda: 12.5)
    recorder.write(group(Status.FINISHED, records=({"reward": 1.0, "text": "a\nb"}, {"text": "\ud83d"})))
    recorder.write(group(Status.FINISHED))
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    when = {"ended_s": 12.5, "group_s": 0.1}
    assert rows == [{"reward": 1.0, "text": "a\nb", **when}, {"text": "\ud83d", **when}]


def test_a_long_record_is_shortened_to_its_limit_and_says_so(tmp_path, group):
    recorder = TrajectoryRecorder(tmp_path / "t.jsonl", max_line_bytes=2000)
    recorder.write(group(records=({"id": "g1", "turns": [{"text": "x" * 9000, "reward": 0.5}]},)))
    recorder.close()
    line = (tmp_path / "t.jsonl").read_text()
    row = json.loads(line)
    assert len(line) <= 2001
    assert (row["id"], row["clipped"], row["turns"][0]["reward"]) == ("g1", True, 0.5)
    assert row["turns"][0]["text"].startswith("xxx")
    assert len(row["turns"][0]["text"]) > 500


@given(st.dictionaries(st.text(), st.text(st.characters(codec=None)) | st.lists(st.integers())), st.integers(100, 400))
def test_no_line_is_longer_than_its_limit(record, limit):
    line = encode_capped(record, limit)
    assert len(line) <= limit
    json.loads(line)


def test_a_record_with_too_many_keys_keeps_only_its_size():
    record = {f"key {i}": i for i in range(1000)}
    assert json.loads(encode_capped(record, 200)) == {"clipped": True, "bytes": len(json.dumps(record))}


@pytest.mark.parametrize(
    ("value", "clipped"),
    [("abcd", "ab…"), ("ab", "ab"), ([1, 2, 3], [1, 2]), ({"a": ("xyz", 7)}, {"a": ["xy…", 7]}), (123456, 123456), (None, None)],
)
def test_clip_shortens_texts_and_lists_only(value, clipped):
    assert clip(value, 2) == clipped
