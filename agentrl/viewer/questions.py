"""The questions that a page may ask, and what answers them; the same for the server and for a page in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from agentrl.config.methods import METHODS
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.examine import examine
from agentrl.doctor.report import trend_text
from agentrl.inspect.episode import episode_answer, group_answer, record_answer
from agentrl.inspect.listing import changes_answer, episode_list, run_answer
from agentrl.inspect.reader import RunReader, settings_differ
from agentrl.inspect.samples import sample_answer, sample_list
from agentrl.inspect.search import search
from agentrl.inspect.series import series, step_rows
from agentrl.inspect.spikes import token_answer
from agentrl.inspect.steps import step_answer
from agentrl.inspect.tasks import evaluation_answer, one_task, task_list
from agentrl.track.index import TRAINING
from agentrl.viewer.runs import MAX_OPEN, RunCollection

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
        number = self.optional(name, low, high)
        return default if number is None else number

    def optional(self, name: str, low: int = 0, high: int = 2**53) -> int | None:
        """Return a whole number; `None` if it is not given."""
        text = self.values.get(name, "")
        if not text:
            return None
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ConfigError(name, text, "is not a number in range", f"Give {low} to {high}.")
        return number

    def number(self, name: str) -> float | None:
        """Return a number; `None` if it is not given."""
        text = self.values.get(name, "")
        try:
            return float(text) if text else None
        except ValueError as error:
            raise ConfigError(name, text, "is no number", "Give one such as 0.5.") from error

    def names(self, name: str) -> list[str]:
        """Return texts with commas between them."""
        return [text for text in self.text(name).split(",") if text]

    def page(self, limit: int) -> dict[str, int]:
        """Return the part of a list that is asked for, of which `limit` is the length if none is given."""
        return {"offset": self.whole("offset", 0), "limit": self.whole("limit", limit, 1, MAX_LIMIT)}


Question: TypeAlias = Callable[[RunCollection, Mapping[str, Any], Words], Any]


def _runs(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    return {"folder": str(collection.folder), "single": collection.single, "runs": collection.cards()}


def _compare(collection: RunCollection, place: Mapping[str, Any], words: Words) -> Any:
    names, cards = words.names("runs")[:8], {card["id"]: card for card in collection.cards()}
    readers = [collection.run(name) for name in names]
    return {"runs": [cards[name] for name in names], "settings": settings_differ(readers)}


def _episodes(run: RunReader, place: Mapping[str, Any], words: Words) -> Any:
    chosen: dict[str, Any] = {name: words.text(name) for name in ("task", "status", "agent", "source", "text")}
    chosen |= {name: words.optional(name) for name in ("step", "group")}
    chosen |= {name: words.number(name) for name in ("min_reward", "max_reward")}
    return episode_list(run, chosen, sort=words.text("sort", "-time"), **words.page(50))


def _group(run: RunReader, place: Mapping[str, Any], words: Words) -> Any:
    return group_answer(run, place["group"], words.optional("attempt"), words.text("source", TRAINING))


def _tasks(run: RunReader, place: Mapping[str, Any], words: Words) -> Any:
    return task_list(run, sort=words.text("sort", "hardest"), text=words.text("text"), **words.page(100))


def _examined(run: RunReader) -> Any:
    return _verdict(run, changes_answer(run)["version"])


@lru_cache(maxsize=MAX_OPEN)
def _verdict(run: RunReader, version: str) -> Any:
    """Return the verdict on a run as far as it has come, which is the same until there is something new."""
    examination = examine(Evidence(run), str(run.path))
    return {**examination.to_dict(), "trend_text": trend_text(examination)}


def _search(run: RunReader, place: Mapping[str, Any], words: Words) -> Any:
    after, limit, case = words.whole("after", 0), words.whole("limit", 50, 1, 500), words.text("case") == "1"
    return search(run, words.text("text"), case=case, after=after, limit=limit, seconds=MAX_SEARCH_S)


_OF_A_RUN: Mapping[str, Callable[[RunReader, Mapping[str, Any], Words], Any]] = {
    "": lambda run, place, words: run_answer(run, place["run"], METHODS[run.tuned_by].config if run.tuned_by in METHODS else TrainConfig),
    "/metrics": lambda run, place, words: series(run.metrics, words.names("names"), words.whole("points", 1000, 1, 20_000)),
    "/doctor": lambda run, place, words: _examined(run),
    "/changes": lambda run, place, words: changes_answer(run),
    "/steps": lambda run, place, words: step_rows(run.metrics, **words.page(200)),
    "/step/{step:int}": lambda run, place, words: step_answer(run, place["step"]),
    "/step/{step:int}/tokens": lambda run, place, words: token_answer(
        run, place["step"], words.text("by", "mismatch"), words.whole("limit", 30, 1, 500)
    ),
    "/episodes": _episodes,
    "/episode/{episode}": lambda run, place, words: episode_answer(run, place["episode"], words.optional("attempt")),
    "/record/{episode}": lambda run, place, words: record_answer(run, place["episode"], words.optional("attempt")),
    "/group/{group:int}": _group,
    "/tasks": _tasks,
    "/task/{task:path}": lambda run, place, words: one_task(run, place["task"]),
    "/evaluations": lambda run, place, words: evaluation_answer(run),
    "/samples": lambda run, place, words: sample_list(run),
    "/sample/{row:int}": lambda run, place, words: sample_answer(run, place["row"]),
    "/search": _search,
}


def _of_a_run(answer: Callable[[RunReader, Mapping[str, Any], Words], Any]) -> Question:
    return lambda collection, place, words: answer(collection.run(place["run"]), place, words)


QUESTIONS: Mapping[str, Question] = {
    "api/runs": _runs,
    "api/changes": lambda collection, place, words: collection.changes(),
    "api/compare": _compare,
    **{"api/run/{run}" + rest: _of_a_run(answer) for rest, answer in _OF_A_RUN.items()},
}
"""Address -> what answers it, from the parameters in the address and those behind it."""


def address(*parts: str, **words: Any) -> str:
    """Return the address of a question as a page asks it: parts quoted, parameters in the order of their names."""
    # These characters are the ones that `encodeURIComponent` of JavaScript leaves alone.
    path = "api/" + "/".join(quote(str(part), safe="!'()*~") for part in parts)
    return path + ("?" + urlencode(sorted(words.items())) if words else "")
