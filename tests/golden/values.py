"""Values of the runtime in JSON's own types, with what differs from machine to machine and from day to day masked."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
DATED = re.compile(r"-\d{8}-\d{6}(?:-\d+)?\b")
RANDOM = re.compile(r"/[^\s\"':]*/agentrl-[A-Za-z0-9_]+|given:[^\s\"']*")
USER_MODULE = re.compile(r"agentrl_[a-z]+_\w+?_[0-9a-f]{8,}")
RUN_SECTION = re.compile(r"^RunConfig\(.*\)$", re.DOTALL)


def without_lines(text: str) -> str:
    """Return a text without the line numbers of a traceback, which every edit of a file moves."""
    return re.sub(r'", line \d+, in ', '", line N, in ', text)


class Masks:
    """Texts that stand for places: longest first, so that a place within another is named by itself."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = sorted(places.items(), key=lambda item: -len(item[0]))

    def text(self, text: str) -> str:
        """Return a text with the names of places, dates and addresses masked."""
        for place, name in self._places:
            text = text.replace(place, name)
        text = RANDOM.sub("RANDOM", DATED.sub("-DATE", text))
        text = USER_MODULE.sub("USER_MODULE", ADDRESS.sub("0xADDRESS", text))
        return without_lines(RUN_SECTION.sub("the settings of the run", text))


def plain(value: Any, masks: Masks) -> Any:
    """Return a value in JSON's own types; a dataclass is its fields and its properties, any other object the name of its class."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | Path):
        return plain(value.value, masks) if isinstance(value, Enum) else masks.text(str(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return _collection(value, masks)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item, masks) for name, item in facts(value)}
    return _function(value, masks) if callable(value) else f"<{type(value).__name__}>"


def _collection(value: Any, masks: Masks) -> Any:
    if isinstance(value, Mapping):
        return {masks.text(str(key)): plain(item, masks) for key, item in value.items()}
    items = [plain(item, masks) for item in value]
    return sorted(items, key=repr) if isinstance(value, set | frozenset) else items


def _function(value: Any, masks: Masks) -> Any:
    if isinstance(value, functools.partial):
        return {"function": name_of(value.func, masks), "arguments": plain(value.args, masks), "keywords": plain(value.keywords, masks)}
    return name_of(value, masks)


def facts(value: Any) -> Iterable[tuple[str, Any]]:
    """Yield the fields of a dataclass and the properties that follow from them."""
    for name in fact_names(type(value)):
        yield name, getattr(value, name)


@functools.cache
def fact_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, and of its properties."""
    properties = inspect.getmembers(kind, lambda member: isinstance(member, property))
    return (*(item.name for item in dataclasses.fields(kind)), *(name for name, _ in properties))


def name_of(function: Any, masks: Masks) -> str:
    """Return the name of a function or class; a module of the user's file has no name of its own."""
    if (owner := getattr(function, "__self__", None)) is not None and not inspect.ismodule(owner):
        return f"{type(owner).__name__}.{getattr(function, '__name__', '')}"
    module = str(getattr(function, "__module__", ""))
    module = module if module.partition(".")[0] in ("agentrl", "builtins") else "user"
    return masks.text(f"{module}:{getattr(function, '__qualname__', type(function).__name__)}")


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a value in JSON's own types by their paths; a list of texts and numbers is a leaf."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        parts = enumerate(value)
    leaves: dict[str, Any] = {}
    for key, item in parts:
        name = str(key).replace("/", "~")
        leaves |= flat(item, f"{path}/{name}" if path else name)
    return leaves or {path: value}
