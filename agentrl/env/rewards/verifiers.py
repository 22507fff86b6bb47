"""Verifiers for common answers: rewards ``(completion, label) -> bool``, and functions that return such rewards."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import regex

Verifier: TypeAlias = Callable[[str, Any], bool]

REGEX_TIMEOUT_S = 1.0


def exact_match(completion: str, label: Any) -> bool:
    """Return True if the answer equals the label, ignoring surrounding white space."""
    return completion.strip() == str(label).strip()


def math_equal(completion: str, label: Any) -> bool:
    r"""Return True if the answer's last expression equals the label: ``0.5``, ``\frac{1}{2}`` and ``\boxed{1/2}`` are equal.

    Uses math-verify (https://github.com/huggingface/Math-Verify), installed by ``pip install 'agentrl[math]'``. The time
    limits of math-verify need the main thread and are off; the deadline of the environment's step applies instead.
    """
    parse, verify = _math_verify()
    return bool(verify(parse(_as_math(str(label)), parsing_timeout=None), parse(completion, parsing_timeout=None), timeout_seconds=None))


def json_equal(completion: str, label: Any) -> bool:
    """Return True if the answer is JSON, alone or as the only fenced code block, and equals the label.

    Args:
        completion: Text of the answer.
        label: A value, or JSON text.
    """
    fenced = re.findall(r"```(?:json)?\s*\n(.*?)\n\s*```", completion, flags=re.DOTALL)
    text = fenced[0] if len(fenced) == 1 else completion
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return False
    wanted = json.loads(label) if isinstance(label, str) else label
    return json.dumps(answer, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def matches(pattern: str) -> Verifier:
    """Return a verifier that is true if the whole answer matches a regular expression; a dot also matches line breaks.

    A match that takes longer than one second raises `TimeoutError`, so the episode fails; it does not earn 0.
    """
    # Not `re`, which has no time limit, and keeps Python's lock while it searches.
    compiled = regex.compile(pattern, regex.DOTALL)

    def verify(completion: str, label: Any) -> bool:
        return compiled.fullmatch(completion, timeout=REGEX_TIMEOUT_S, concurrent=True) is not None

    return verify


def extract(pattern: str, verifier: Verifier = exact_match) -> Verifier:
    """Return a verifier that applies `verifier` to a pattern's last match: to the first group if it has one, else to all of it.

    Example:
        >>> right = extract(r"<answer>(.*?)</answer>", math_equal)
    """
    compiled = regex.compile(pattern, regex.DOTALL)

    def verify(completion: str, label: Any) -> bool:
        found = list(compiled.finditer(completion, timeout=REGEX_TIMEOUT_S, concurrent=True))
        return bool(found) and verifier(found[-1].group(1 if compiled.groups else 0) or "", label)

    return verify


def _as_math(label: str) -> str:
    return label if "$" in label or "\\boxed" in label else f"${label}$"


@lru_cache
def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("math_equal needs the package math-verify: pip install 'agentrl[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its time limits are off
    return parse, verify
