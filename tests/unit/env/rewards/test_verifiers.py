"""Verifiers of common answers."""

import threading
from typing import Any

import pytest

from agentrl import verifiers


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (r"So the answer is $\frac{1}{2}$.", "0.5", True),
        (r"\boxed{1/2}", r"\frac{1}{2}", True),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        ("The answer is 17", 7, False),
        ("7", 7, True),
        ("", "7", False),
        ("no idea", "7", False),
    ],
)
def test_math_equality_also_on_a_thread(completion: str, label: Any, expected: bool) -> None:
    pytest.importorskip("math_verify")
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(verifiers.math_equal(completion, label)))
    thread.start()
    thread.join()
    assert found == [expected]


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ('{"b": [1, 2], "a": null}', {"a": None, "b": [1, 2]}, True),
        ('Here:\n```json\n{"a": 1}\n```\n', '{"a": 1}', True),
        ('{"a": 1}', {"a": True}, False),
        ("[1, 2]", [2, 1], False),
        ('sure: {"a": 1}', {"a": 1}, False),
        ("[" * 100_000, [], False),
    ],
)
def test_json_equality(completion: str, label: Any, expected: bool) -> None:
    assert verifiers.json_equal(completion, label) is expected


def test_exact_match_is_not_fooled_by_a_longer_answer() -> None:
    assert verifiers.exact_match(" 7\n", 7)
    assert not verifiers.exact_match("17", "7")


def test_form_and_extraction() -> None:
    form = verifiers.matches(r"<think>.*</think>\d+")
    assert form("<think>a\nb</think>12", None)
    assert not form("<think>a</think>12 or 13", None)
    tagged = verifiers.extract(r"<answer>(.*?)</answer>")
    assert tagged("<answer>1</answer> no, <answer> 2 </answer>", "2")
    assert not tagged("<answer>1</answer> no, <answer>2</answer>", "1")
    assert not tagged("2", "2")
    assert verifiers.extract(r"\d+")("1 then 23", "23")


def test_a_pattern_that_explodes_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(TimeoutError):  # four groups repeated backwards: a search through millions of splits
        verifiers.matches(r"(.+)(.+)(.+)(.+)b\4\3\2\1")("a" * 400 + "b" + "a" * 399, None)
