"""Answers for a page in one file: those that its views ask for, of some episodes, some steps, or a whole small run."""

from __future__ import annotations

import base64
import hashlib
import html
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.files import write_text
from agentrl.inspect.reader import RunReader
from agentrl.track.jsonl import encode
from agentrl.viewer.app import to_json
from agentrl.viewer.images import episode_image
from agentrl.viewer.questions import QUESTIONS, Words, address
from agentrl.viewer.runs import RunCollection

STATIC = Path(__file__).parent / "static"

_IMPORT = re.compile(r'^import\s*(\{[^}]*\}|\w+)\s*from\s*"([^"]+)";?', re.MULTILINE)
_EXPORT_LIST = re.compile(r"(?:^|(?<=[;}]))export\s*\{([^}]*)\};?", re.MULTILINE)
_EXPORT_NAME = re.compile(r"^export (?=(?:async )?(?:function|const|let) (\w+))", re.MULTILINE)
_EXPORT_DEFAULT = re.compile(r"(?:^|(?<=[;}]))export default ", re.MULTILINE)

_POLICY = "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; form-action 'none'"
_PAGE = """<!doctype html>
<html lang="en" data-start="{start}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>agentrl</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="page"><p class="empty">The page needs JavaScript.</p></div>
<script type="application/json" id="answers">{answers}</script>
<script>{charts}</script>
<script type="module">{modules}</script>
</body>
</html>
"""


def single_page(answers: Mapping[str, Any], *, start: str) -> str:
    """Return the whole page as one HTML text.

    Args:
        answers: What the server would answer, by address as the page asks for it, such as ``api/run/demo/episode/3-0-1``; what is not
            finite becomes null.
        start: Place at which the page opens, such as ``#/run/demo/episode/3-0-1``.
    """
    style = _text("vendor/uplot.css") + _text("style.css")
    charts, modules = _text("vendor/uplot.js"), bundle()
    return _PAGE.format(
        start=html.escape(start, quote=True),
        # The hashes allow these scripts alone, so that text of an episode cannot become one.
        policy=_POLICY.format(scripts=f"{_hash(charts)} {_hash(modules)}", styles=_hash(style)),
        style=style,
        charts=charts,
        modules=modules,
        # Text of an episode may hold the end of a script element.
        answers=encode(answers).replace("<", "\\u003c"),
    )


def bundle(entry: str = "main.js") -> str:
    """Return the modules that `entry` imports, and `entry` itself, as one module without imports.

    Every module becomes a function that returns what the module exports, in the order in which they need each other.

    Raises:
        ValueError: If modules import each other in a circle, or one holds the end of a script element.
    """
    names: dict[str, str] = {}
    parts: list[str] = []

    def add(path: str, under: tuple[str, ...]) -> str:
        if path in under:
            raise ValueError(f"{path} imports itself by way of {' and '.join(under)}")
        if path not in names:
            source = _text(path)
            for _, target in _IMPORT.findall(source):
                add(_beside(path, target), (*under, path))
            names[path] = f"m{len(names)}"
            parts.append(f"const {names[path]} = (() => {{\n{_as_function(path, source, names)}\n}})();\n")
        return names[path]

    add(entry, ())
    whole = "".join(parts)
    if "</script" in whole.lower() or "<!--" in whole:
        raise ValueError("a module holds the end of a script element or the beginning of a comment of HTML")
    return whole


def _as_function(path: str, source: str, names: Mapping[str, str]) -> str:
    """The body of a function that does what a module does, and returns what it exports."""
    exported: list[str] = _EXPORT_NAME.findall(source)

    def taken(match: re.Match[str]) -> str:
        wanted, module = match[1], names[_beside(path, match[2])]
        return f"const {re.sub(r' as ', ': ', wanted)} = {module};" if wanted.startswith("{") else f"const {wanted} = {module}.default;"

    def given(match: re.Match[str]) -> str:
        for item in filter(None, (part.strip() for part in match[1].split(","))):
            inner, _, outer = item.partition(" as ")
            exported.append(f"{outer}: {inner}" if outer else inner)
        return ""

    body = _EXPORT_LIST.sub(given, _IMPORT.sub(taken, source))
    body = _EXPORT_NAME.sub("", body)
    if _EXPORT_DEFAULT.search(body):
        body = _EXPORT_DEFAULT.sub("const whole = ", body)
        exported.append("default: whole")
    return f"{body}\nreturn {{ {', '.join(exported)} }};"


def _beside(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _text(path: str) -> str:
    return (STATIC / path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
