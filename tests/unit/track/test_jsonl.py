"""Lines that every JSON reader accepts."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.types import Status
from agentrl.track.jsonl import JsonLines, encode, encode_indented, read_lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def refuse_constant(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


@given(JSON)
def test_every_value_becomes_one_ascii_line_of_strict_json(value):
    line = encode(value)
    assert line.isascii()
    assert "\n" not in line
    json.loads(line, parse_constant=refuse_constant)


def test_values_keep_their_meaning():
    value = {"a": [1, 2.5, None, True], "text": "é\ud800", "nested": {"x": float("nan"), "y": float("-inf")}}
    assert json.loads(encode(value)) == json.loads(encode_indented(value)) == {**value, "nested": {"x": None, "y": None}}


def test_numpy_enums_and_unknown_objects_are_rendered():
    value = {"array": np.array([1, 2]), "scalar": np.float32(0.5), "nan": np.float64("nan"), "status": Status.TIMEOUT, "object": {1}}
    assert json.loads(encode(value)) == {"array": [1, 2], "scalar": 0.5, "nan": None, "status": "timeout", "object": "{1}"}


def test_a_line_is_on_disk_before_the_file_is_closed(tmp_path):
    lines = JsonLines(tmp_path / "new" / "a.jsonl")
    lines.write(encode({"a": 1}))
    assert read_lines(tmp_path / "new" / "a.jsonl") == [{"a": 1}]
    lines.close()
    lines.close()


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        read_lines(path)
