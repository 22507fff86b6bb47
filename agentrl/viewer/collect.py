"""Answers for a page in one file: those that its views ask for, of some episodes, some steps, or a whole small run."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.files import write_text
from agentrl.inspect.reader import RunReader
from agentrl.viewer.app import to_json
from agentrl.viewer.images import episode_image
from agentrl.viewer.page import single_page
from agentrl.viewer.questions import QUESTIONS, Words, address
from agentrl.viewer.runs import RunCollection

MAX_BYTES = 30_000_000
LISTS = ("metrics", "steps", "episodes", "tasks", "evaluations")
LONG = {"steps": {"limit": "1000"}, "episodes": {"limit": "1000"}, "tasks": {"limit": "1000"}}


def write_page(collection: RunCollection, path: Path, *, episodes: Sequence[str] = (), steps: Sequence[int] = ()) -> int:
    """Write the page with its answers into one file, and return the size in bytes.

    Args:
        collection: The runs, of which there must be one.
        path: The file.
        episodes: Episodes to show; together with `steps` none stand for the whole run.
        steps: Steps to show, with their recorded episodes.

    Raises:
        ConfigError: If there are several runs, something is not recorded, the file would be too large, or cannot be written.
    """
    names = [card["id"] for card in collection.cards()]
    if len(names) != 1:
        raise ConfigError("--html", str(path), f"shows one run, and there are {len(names)}", "Name a run's directory.")
    answers = _Answers(collection, names[0])
    start = answers.choose(episodes, steps)
    text = single_page(answers.found, start=start)
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError("--html", str(path), f"cannot be written: {error.strerror or error}", "Name another place.") from error
    return path.stat().st_size


class _Answers:
    """Answers by the address at which the page asks for them."""

    def __init__(self, collection: RunCollection, run: str) -> None:
        self._collection, self._run = collection, run
        self._reader: RunReader = collection.run(run)
        self._reader.store.complete()
        self.found: dict[str, Any] = {}
        self._bytes = 0

    def choose(self, episodes: Sequence[str], steps: Sequence[int]) -> str:
        """Take the answers for some episodes and steps, or for everything; return where the page opens."""
        self._take("api/runs")
        self._take("api/run/{run}")
        self._take("api/run/{run}/doctor")
        whole = not episodes and not steps
        for name in LISTS if whole or steps else LISTS[:1]:
            self._take(f"api/run/{{run}}/{name}", words=LONG.get(name))
        for row in self._take("api/run/{run}/samples")["rows"] if whole else ():
            self._take("api/run/{run}/sample/{row:int}", row=row["row"])
        for step in self._reader.metrics.steps if whole else steps:
            self._step(step, whole=whole)
        for episode in episodes:
            self._episode(episode)
        if whole:
            names = self._reader.store.query("SELECT DISTINCT episode FROM episodes ORDER BY id")
            self._all(row[0] for row in names)
        return self._start(episodes, steps)

    def _start(self, episodes: Sequence[str], steps: Sequence[int]) -> str:
        place = ("episode", episodes[0]) if episodes else ("step", str(steps[0])) if steps else ()
        return "#/" + address("run", self._run, *place).removeprefix("api/")

    def _step(self, step: int, *, whole: bool) -> None:
        answer = self._take("api/run/{run}/step/{step:int}", step=step)
        self._take("api/run/{run}/step/{step:int}/tokens", step=step)
        if not whole:
            self._all(name for row in (*answer["groups"], *answer["others"]) for name in row["recorded"])

    def _all(self, episodes: Iterable[str]) -> None:
        for episode in episodes:
            self._episode(episode)

    def _episode(self, episode: str) -> None:
        answer = self._take("api/run/{run}/episode/{episode}", episode=episode)
        self._take("api/run/{run}/record/{episode}", episode=episode)
        for number in range(answer["images"]):
            if (image := episode_image(self._reader, episode, number)) is not None:
                place = address("run", self._run, "image", episode, str(number))
                self.found[place] = f"data:{image[1]};base64,{base64.b64encode(image[0]).decode()}"
        if answer["source"] == "train" and answer["group"] is not None:
            self._take("api/run/{run}/group/{group:int}", group=answer["group"])

    def _take(self, question: str, *, words: Mapping[str, str] | None = None, **place: Any) -> Any:
        place = {"run": self._run, **place}
        parts = question.split("/")[1:]
        key = address(*(str(place[part[1:-1].partition(":")[0]]) if part.startswith("{") else part for part in parts))
        if key not in self.found:
            answer = QUESTIONS[question](self._collection, place, Words(words or {}))
            self.found[key] = answer
            self._bytes += len(to_json(answer))
            if self._bytes > MAX_BYTES:
                limit = f"its page would be larger than {MAX_BYTES // 10**6} MB"
                raise ConfigError("RUN", self._run, limit, "Choose some episodes or steps: --episode NAME, --step N.")
        return self.found[key]
