"""Parsing and errors of specifications ``scheme:ID?option=value&...``, and the base class of suite environments."""

from __future__ import annotations

import ast
import difflib
import importlib
import itertools
import logging
import random
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import numpy as np

from agentrl.core import plugins
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.types import Task
from agentrl.env.agent import AgentInstance
from agentrl.env.remote.wire import HTTP, check_url
from agentrl.suites.scheme import FLAG

MAX_PROBLEM = 300
MAX_NUMBERS = 64
"""Numbers that are taken from an answer of a server."""


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the part between scheme and question mark, and the options, read as Python literals, else as text."""
    name, _, query = spec.partition(":")[2].partition("?")
    return name, {key: _literal(value) for key, value in parse_qsl(query, keep_blank_values=True)}


def named_object(spec: str, form: str) -> tuple[Any, str, dict[str, Any]]:
    """Return the object of ``SCHEME:file.py@NAME?option=value`` or ``SCHEME:module@NAME``, the text with the whole path, and the options.

    Raises:
        EnvLoadError: If there is none; `form` is the remedy.
    """
    name, options = split_spec(spec)
    place, _, wanted = name.partition("@")
    if place.endswith(".py"):
        file = Path(place).expanduser().absolute()
        module = plugins.import_file(FLAG, spec, file, prefix="agentrl_user", forms=form, error=EnvLoadError)
        spec = spec.replace(place, str(file), 1)  # other processes of the run may have another current directory
    else:
        with plugins.search_first(str(Path.cwd())), plugins.named_errors(FLAG, spec, EnvLoadError):
            module = importlib.import_module(place)
    if not wanted or not hasattr(module, wanted):
        public = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise EnvLoadError(FLAG, spec, f"there is no {wanted!r} in it", plugins.suggest(wanted, public) or form)
    return getattr(module, wanted), spec, options


def take_count(spec: str, options: dict[str, Any], name: str) -> int | None:
    """Remove the option `name` from `options` and return its value, a positive whole number; `None` if absent."""
    value = options.pop(name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise EnvLoadError(FLAG, spec, f"{name} = {value!r} is out of range", "Give a whole number from 1.")
    return value


def check_options(spec: str, options: Mapping[str, Any], good: Mapping[str, Callable[[Any], Any]], known: str, remedy: str) -> None:
    """Refuse options that are not among `good`, whose functions say which values are in range; `known` is the remedy for unknown ones."""
    for name, value in options.items():
        if name not in good:
            raise EnvLoadError(FLAG, spec, f"there is no option {name!r}", known)
        if not good[name](value):
            raise EnvLoadError(FLAG, spec, f"{name} = {value!r} is out of range", remedy)


def is_positive(value: Any) -> bool:
    """Return True for a number above 0."""
    return type(value) in (int, float) and value > 0


def is_count(value: Any) -> bool:
    """Return True for a whole number above 0."""
    return type(value) is int and value > 0


def server_url(url: str, form: str, schemes: tuple[str, ...] = HTTP) -> str:
    """Return the address of a server as `check_url` does; `EnvLoadError` shows the `form` of a specification."""
    try:
        return check_url(url, schemes)
    except ConfigError as error:
        raise EnvLoadError(FLAG, error.value, error.problem, f"Write {form}.") from error


def figures(values: Any, left_out: Collection[str] = ()) -> dict[str, float]:
    """Return the first numbers in what a server says; nothing if it is no object."""
    items = values.items() if isinstance(values, Mapping) else ()
    numbers = ((str(key), value) for key, value in items if key not in left_out and isinstance(value, int | float))
    # NaN and infinities fail the comparison too.
    return {key: float(value) for key, value in itertools.islice((item for item in numbers if abs(item[1]) < 1e300), MAX_NUMBERS)}


def seeded_tasks(name: str, count: int | None, **metadata: Any) -> Iterable[Task]:
    """A task for each of the seeds 0, 1, ...; if no `count` is given no end of them, with seeds derived from the run's."""
    if count is None:
        return (Task(f"{name}, episode {number}", id=str(number), metadata=metadata) for number in itertools.count())
    return [Task(f"{name}, seed {seed}", id=str(seed), seed=seed, metadata=metadata) for seed in range(count)]


def import_suite(spec: str, module: str, extra: str, package: str = "") -> ModuleType:
    """Import an optional package without letting it set up logging for everybody; `EnvLoadError` if it is not installed.

    The remedy names an `extra` of agentrl, or the `package`.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"importing {module} raised {type(error).__name__}: {error}"
        raise EnvLoadError(FLAG, spec, problem, f"Run: pip install {package or repr(f'agentrl[{extra}]')}.") from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def check_known(spec: str, suite: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that a suite does not have; the message offers the most similar names."""
    if name not in known:
        raise EnvLoadError(FLAG, spec, f"{suite} has no {name!r}", _similar(name, known))


def refused(spec: str, what: str, error: BaseException, remedy: str) -> EnvLoadError:
    """Return the error for a specification for which a suite raised `error`."""
    words = re.search(r"nltk\.download\('(\w+)'\)", str(error)) if isinstance(error, LookupError) else None
    if words is not None:
        return EnvLoadError(FLAG, spec, f"needs the word list {words[1]!r}", f"Download it: python -m nltk.downloader {words[1]}")
    text = " ".join(str(error).split())
    return EnvLoadError(FLAG, spec, f"{what} raised {type(error).__name__}: {text[:MAX_PROBLEM]}", remedy)


def class_name(name: str, default: str) -> str:
    """Return a Python identifier made from a name."""
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


SEEDS = 2**32  # numpy's global generator takes no more
WAIT_S = 50.0

_lock = threading.Lock()


class EpisodeRandom:
    """The global generators of `random` and numpy as one episode sees them.

    gem and TextArena seed the global generators in every reset and draw from them in every step, so two episodes in one
    process would disturb each other. While a call of an episode runs, the global generators hold the episode's state;
    afterwards the previous state is restored. Such calls therefore run one at a time in a process. Other code that draws
    from the global generators at the same moment on another thread is not kept out.

    Args:
        seed: Initial seed of the episode's generators.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed % SEEDS
        self._inside: tuple[Any, Any] | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Lend the global generators to this episode; `TimeoutError` if another episode holds them for 50 s."""
        if not _lock.acquire(timeout=WAIT_S):
            raise TimeoutError(f"another episode's environment has kept the global random generators for {WAIT_S:g} s")
        try:
            outside = _get()
            self._begin()
            try:
                yield
            finally:
                self._inside = _get()
                _set(outside)
        finally:
            _lock.release()

    def _begin(self) -> None:
        if self._inside is None:
            random.seed(self._seed)
            np.random.seed(self._seed)
        else:
            _set(self._inside)


def _get() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


class SuiteEnv(AgentInstance):
    """One episode of an environment of a suite.

    Attributes:
        suite: Module of the suite.
        env_id: Name that the suite knows.
        env_options: Keyword arguments of the suite's `make`.
        num_tasks: Number of tasks, with the seeds 0, 1, ...; `None`: endless tasks, with seeds derived from the run's.
    """

    suite: ClassVar[str] = ""
    env_id: ClassVar[str] = ""
    env_options: ClassVar[Mapping[str, Any]] = {}
    num_tasks: ClassVar[int | None] = None

    _env: Any = None
    _random: EpisodeRandom

    @classmethod
    def make(cls) -> Any:
        """Make the suite's environment; `reset` does so while the global generators are the episode's."""
        return importlib.import_module(cls.suite).make(cls.env_id, **cls.env_options)

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per seed; all episodes of a group use the same seed."""
        return seeded_tasks(cls.env_id, cls.num_tasks)
