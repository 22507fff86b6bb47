from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl.check.context import digest, stable
from agentrl.core.types import Task


@dataclass
class Point:
    x: float
    y: float


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


SAME: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"x", "y"}, {"y", "x"}),
    (np.arange(4), np.arange(4)),
    (np.array([{"a": 1}, None], object), np.array([{"a": 1}, None], object)),
    (Image.new("RGB", (8, 4), "red"), Image.new("RGB", (8, 4), (255, 0, 0))),
    (Point(1.0, float("nan")), Point(1.0, float("nan"))),
    (Plain([1]), Plain([1])),
]
DIFFERENT: list[tuple[Any, Any]] = [
    ([1, 2], [2, 1]),
    (np.arange(4), np.arange(4).reshape(2, 2)),
    (np.zeros(4), np.zeros(4, np.int64)),
    (Image.new("RGB", (8, 4)), Image.new("HSV", (8, 4))),
    (Image.new("RGB", (8, 4), "red"), Image.new("RGB", (8, 4), "blue")),
    (Image.new("RGB", (8, 4), "red"), Image.new("RGB", (4, 8), "red")),
    (Image.new("RGB", (3, 1)), Image.new("L", (9, 1))),
    (Point(1.0, 2.0), Point(2.0, 1.0)),
    (Plain(1), Plain(2)),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_equal_values_have_equal_texts(one: Any, two: Any) -> None:
    assert stable(one) == stable(two)


@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_other_values_have_other_texts(one: Any, two: Any) -> None:
    assert stable(one) != stable(two)


def test_the_text_of_a_picture_is_short() -> None:
    assert len(stable(Image.new("RGB", (2000, 2000)))) < 100


def test_tasks_are_the_same_but_for_their_ids() -> None:
    picture = Image.new("RGB", (8, 4), "red")
    assert digest(Task("Where?", id="a", images=[picture])) == digest(Task("Where?", id="b", images=[picture.copy()]))
    assert digest(Task("Where?", id="a", images=[picture])) != digest(
        Task("Where?", id="a", images=[picture.rotate(180, expand=False), picture])
    )
