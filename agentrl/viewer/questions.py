"""The questions that a page may ask, and what answers them; the same for the server and for a page in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from agentrl.core.errors import ConfigError
from agentrl.inspect.episode import episode_answer, group_answer, record_answer
from agentrl.inspect.listing import episode_list, run_answer
from agentrl.inspect.reader import settings_differ
from agentrl.inspect.search import search
from agentrl.inspect.series import series, step_rows
from agentrl.inspect.spikes import token_answer
from agentrl.inspect.steps import step_answer
from agentrl.inspect.tasks import evaluation_answer, one_task, task_list
from agentrl.track.index import TRAINING
from agentrl.viewer.runs import RunCollection

MAX_LIMIT = 1000
MAX_SEARCH_S = 0.5
MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Words:
    """The parameters of a question, each with a bound.

    Raises:
        ConfigError: By its methods, if a parameter is no number or out of range.
    """

    values: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """Return a text."""
        return self.values.get(name, default)[:MAX_TEXT]

    def whole(self, name: str, default: int, low: int = 0, high: int = 2**53) -> int:
        """Return a whole number."""
        found = self.optional(name, low, high)
        return default if found is None else found

    def optional(self, name: str, low: int = 0, high: int = 2**53) -> int | None:
        """Return a whole number; `None` if it is not given."""
        given = self.values.get(name, "")
        if not given:
            return None
        try:
            number = int(given)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ConfigError(name, given, "is not a number in range", f"Give {low} to {high}.")
        return number

    def number(self, name: str) -> float | None:
        """Return a number; `None` if it is not given."""
        given = self.values.get(name, "")
        try:
            return float(given) if given else None
        except ValueError as error:
            raise ConfigError(name, given, "is no number", "Give one such as 0.5.") from error

    @property
    def page(self) -> dict[str, int]:
        """The part of a list that is asked for."""
        return {"offset": self.whole("offset", 0), "limit": self.whole("limit", 50, 1, MAX_LIMIT)}


Question: TypeAlias = Callable[[RunCollection, Mapping[str, Any], Words], Any]


def _runs(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    return {"folder": str(collection.folder), "single": collection.single, "runs": collection.cards()}


def _compare(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    names = [name for name in words.text("runs").split(",") if name]
    cards = {card["id"]: card for card in collection.cards()}
    readers = collection.runs(names[:8])
    return {"runs": [cards[name] for name in names[:8]], "settings": settings_differ(readers)}


def _metrics(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    names = [name for name in words.text("names").split(",") if name]
    return series(collection.run(place["run"]).metrics, names, words.whole("points", 1000, 1, 20_000))


def _steps(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    return step_rows(collection.run(place["run"]).metrics, words.whole("offset", 0), words.whole("limit", 200, 1, MAX_LIMIT))


def _episodes(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    chosen: dict[str, Any] = {name: words.text(name) for name in ("task", "status", "agent", "source", "text")}
    chosen |= {name: words.optional(name) for name in ("step", "group")}
    chosen |= {name: words.number(name) for name in ("min_reward", "max_reward")}
    return episode_list(collection.run(place["run"]), chosen, sort=words.text("sort", "-time"), **words.page)


def _tokens(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    return token_answer(collection.run(place["run"]), place["step"], words.text("by", "mismatch"), words.whole("limit", 30, 1, 500))


def _group(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    source = words.text("source", TRAINING)
    return group_answer(collection.run(place["run"]), place["group"], words.optional("attempt"), source)


def _tasks(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    offset, limit = words.whole("offset", 0), words.whole("limit", 100, 1, MAX_LIMIT)
    sort, text = words.text("sort", "hardest"), words.text("text")
    return task_list(collection.run(place["run"]), offset=offset, limit=limit, sort=sort, text=text)


def _search(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    options = {"after": words.whole("after", 0), "limit": words.whole("limit", 50, 1, 500), "seconds": MAX_SEARCH_S}
    return search(collection.run(place["run"]), words.text("text"), case=words.text("case") == "1", **options)  # type: ignore[arg-type]


QUESTIONS: Mapping[str, Question] = {
    "api/runs": _runs,
    "api/changes": lambda collection, place, words: collection.changes(),
    "api/compare": _compare,
    "api/run/{run}": lambda collection, place, words: run_answer(collection.run(place["run"]), place["run"]),
    "api/run/{run}/metrics": _metrics,
    "api/run/{run}/changes": lambda collection, place, words: collection.changes_of(place["run"]),
    "api/run/{run}/steps": _steps,
    "api/run/{run}/step/{step:int}": lambda collection, place, words: step_answer(collection.run(place["run"]), place["step"]),
    "api/run/{run}/step/{step:int}/tokens": _tokens,
    "api/run/{run}/episodes": _episodes,
    "api/run/{run}/episode/{episode}": lambda collection, place, words: episode_answer(
        collection.run(place["run"]), place["episode"], words.optional("attempt")
    ),
    "api/run/{run}/record/{episode}": lambda collection, place, words: record_answer(
        collection.run(place["run"]), place["episode"], words.optional("attempt")
    ),
    "api/run/{run}/group/{group:int}": _group,
    "api/run/{run}/tasks": _tasks,
    "api/run/{run}/task/{task:path}": lambda collection, place, words: one_task(collection.run(place["run"]), place["task"]),
    "api/run/{run}/evaluations": lambda collection, place, words: evaluation_answer(collection.run(place["run"])),
    "api/run/{run}/search": _search,
}
"""Address -> what answers it, from the parameters in the address and those behind it."""


def address(*parts: str, **words: Any) -> str:
    """Return the address of a question as a page asks it: parts quoted, parameters in the order of their names."""
    path = "api/" + "/".join(quote(str(part), safe="!'()*~") for part in parts)
    return path + ("?" + urlencode(sorted(words.items())) if words else "")
