"""What the specifications ``scheme:ID?option=value&...`` have in common."""

from __future__ import annotations

import ast
import difflib
import importlib
import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Task

FLAG = "--agent"
MAX_PROBLEM = 300


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The part between scheme and question mark, and the options, read as Python literals, else as text."""
    name, _, query = spec.partition(":")[2].partition("?")
    return name, {key: _literal(value) for key, value in parse_qsl(query, keep_blank_values=True)}


def take_count(spec: str, options: dict[str, Any], name: str) -> int | None:
    """Remove a positive whole number from `options`; `None` if it is not among them.

    Raises:
        EnvLoadError: If it is something else.
    """
    value = options.pop(name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise EnvLoadError(FLAG, spec, f"{name} = {value!r} is out of range", "Give a whole number from 1.")
    return value


def seeded_tasks(name: str, count: int | None, **metadata: Any) -> Iterable[Task]:
    """A task for each of the seeds 0, 1, ...; if no `count` is given no end of them, with seeds derived from the run's."""
    if count is None:
        return (Task(f"{name}, episode {number}", id=str(number), metadata=metadata) for number in itertools.count())
    return [Task(f"{name}, seed {seed}", id=str(seed), seed=seed, metadata=metadata) for seed in range(count)]


def import_suite(spec: str, module: str, extra: str) -> ModuleType:
    """Import an optional package without letting it set up logging for everybody.

    Raises:
        EnvLoadError: If it or something that it needs is not installed.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"importing {module} raised {type(error).__name__}: {error}"
        raise EnvLoadError(FLAG, spec, problem, f"Run: pip install 'agentrl[{extra}]'.") from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def check_known(spec: str, suite: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that a suite does not have.

    Raises:
        EnvLoadError: With the names that are most like it.
    """
    if name not in known:
        raise EnvLoadError(FLAG, spec, f"{suite} has no {name!r}", _similar(name, known))


def refused(spec: str, what: str, error: BaseException, remedy: str) -> EnvLoadError:
    """The error for a specification that a suite raised an exception for."""
    words = re.search(r"nltk\.download\('(\w+)'\)", str(error)) if isinstance(error, LookupError) else None
    if words is not None:
        return EnvLoadError(FLAG, spec, f"needs the word list {words[1]!r}", f"Download it: python -m nltk.downloader {words[1]}")
    text = " ".join(str(error).split())
    return EnvLoadError(FLAG, spec, f"{what} raised {type(error).__name__}: {text[:MAX_PROBLEM]}", remedy)


def class_name(name: str, default: str) -> str:
    """An identifier made of a name."""
    return re.sub(r"\W", "_", name) or default


def _similar(name: str, known: Collection[str]) -> str:
    by_lower: Mapping[str, str] = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.5)
    close = close or [lower for lower in by_lower if name.lower() in lower][:3] or sorted(by_lower)[:3]
    return f"Did you mean {' or '.join(by_lower[lower] for lower in close)}? There are {len(known)}."


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
