"""The lines of annotations: exact, short, and refused where they are not what was written."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from agentrl.core.annotations import FIGURES, MASKS, Annotation, as_plain, pack, read_annotation, unpack
from agentrl.core.types import floats

FLOATS = st_numpy.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False))


@given(FLOATS)
def test_numbers_come_back_bit_for_bit(values):
    packed = json.loads(json.dumps(pack(floats(values))))
    found = unpack(packed, len(values))
    if packed is None:
        assert not np.isfinite(values).any()
    else:
        np.testing.assert_array_equal(found, values)


def test_equal_numbers_are_one_and_other_counts_are_refused():
    assert pack(floats([0.5] * 9)) == 0.5
    assert pack(floats([np.nan, np.nan])) is None
    packed = pack(floats([1.0, 2.0]))
    assert packed == "AACAPwAAAEA="  # 1.0 and 2.0 as little-endian 32-bit floats
    assert unpack(packed, 3) is None
    for broken in ("AACAPw", "?", None, [1.0], {}):
        assert unpack(broken, 1) is None, broken


def test_a_line_begins_with_the_trajectory_and_holds_what_was_given():
    figures = {name: floats([1.5, -2.5, 3.25]) for name in FIGURES}
    item = Annotation(trajectory_id='a"b', step=4, figures=figures, masks=np.array([0, 3, 1], np.uint8))
    line = item.line()
    assert line.startswith('{"trajectory_id": "a\\"b", "step": 4')
    found = read_annotation(json.loads(line))
    assert (found.trajectory_id, found.step, found.masks.tolist()) == ('a"b', 4, [0, 3, 1])
    assert {name: values.tolist() for name, values in found.figures.items()} == {name: [1.5, -2.5, 3.25] for name in FIGURES}


def test_one_mask_for_all_is_its_name():
    item = Annotation(trajectory_id="a", step=1, figures={}, masks=np.full(3, 2, np.uint8))
    assert json.loads(item.line())["mask"] == str(MASKS[2])
    assert read_annotation(json.loads(item.line())).masks.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "change", [{"tokens": 2}, {"mask": "of a later version"}, {"mask": 1}, {"mask": "/////w=="}, {"tokens": "x"}, {"step": None}]
)
def test_what_is_no_annotation_is_refused(change):
    item = Annotation(trajectory_id="a", step=1, figures={}, masks=np.array([0, 1, 0], np.uint8))
    assert read_annotation({**json.loads(item.line()), **change}) is None
    assert read_annotation({}) is None


def test_numbers_for_json_are_rounded_and_one_where_they_are_equal():
    assert as_plain([0.1234567891, np.nan, np.inf, 2.0]) == [0.123457, None, None, 2.0]
    assert as_plain(np.full(4, 0.25)) == 0.25
    assert as_plain([]) == []
