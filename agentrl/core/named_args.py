"""Arguments of a library that words name, ``name=value`` with JSON values: those of ``--engine-args`` and of ``--deepspeed-args``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def parse_named_args(words: Sequence[str]) -> dict[str, Any]:
    """Return arguments by name: a value is JSON if it reads as such, else text; a name alone stands for true."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        try:
            found[name] = json.loads(value) if equals else True
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found
