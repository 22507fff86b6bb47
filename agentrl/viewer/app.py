"""The application behind the viewer's page: questions in, JSON out, and the files of the page."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.track.jsonl import encode
from agentrl.viewer.images import episode_image
from agentrl.viewer.questions import QUESTIONS, Question, Words
from agentrl.viewer.runs import RunCollection

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Kinds of files that the page consists of."""


def static_folder() -> Path:
    """Return the folder with the files of the page."""
    return Path(str(files("agentrl.viewer") / "static"))


@cache
def page_files() -> dict[str, Path]:
    """Return the files of the page by their addresses; no other file can be asked for."""
    folder = static_folder()
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in TYPES and path.is_file()}


def make_app(collection: RunCollection) -> Starlette:
    """Return the application over some runs, to stand behind a `Guard`."""
    routes = [
        Route("/", _page),
        Route("/static/{path:path}", _page),
        Route("/api/run/{run}/image/{episode}/{number:int}", _image(collection)),
        *(Route("/" + path, _answer(collection, question)) for path, question in QUESTIONS.items()),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_problem, AgentRLError: _problem, Exception: _problem}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _page(request: Request) -> Response:
    path = page_files().get(request.path_params.get("path", "index.html"))
    if path is None:
        raise HTTPException(404, "there is no such file")
    content = first_page() if path.name == "index.html" else path.read_bytes()
    return Response(content, media_type=TYPES[path.suffix])


@cache
def first_page() -> bytes:
    """Return the page with the addresses of all modules, so that a browser asks for them at once and not one import after another."""
    modules = sorted(name for name in page_files() if name.endswith(".js") and name != "vendor/uplot.js")
    links = "".join(f'<link rel="modulepreload" href="static/{name}">\n' for name in modules)
    return page_files()["index.html"].read_bytes().replace(b"</head>", links.encode() + b"</head>")


def _answer(collection: RunCollection, question: Question) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        words = Words(dict(request.query_params))
        content = await run_in_threadpool(question, collection, request.path_params, words)
        # Large answers take long to write as JSON, and must not hold up other requests.
        return Response(await run_in_threadpool(to_json, content), media_type="application/json")

    return answer


def _image(collection: RunCollection) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        place, words = request.path_params, Words(dict(request.query_params))
        run, attempt = collection.run(place["run"]), words.optional("attempt")
        image = await run_in_threadpool(episode_image, run, place["episode"], place["number"], attempt)
        if image is None:
            raise HTTPException(404, "there is no such image, or it is no PNG, JPEG, GIF or WebP file")
        data, kind = image
        return Response(data, media_type=kind)

    return answer


def to_json(value: Any) -> bytes:
    """Return a value as JSON; numbers that are not finite become null."""
    try:
        # The fast encoder first; only values that it refuses are looked through one by one.
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError):
        return encode(value).encode()


NOT_FOUND = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Not found</title></head><body><main><h1>Not found</h1>
<p>The viewer has no such page. Open the address that agentrl view printed.</p></main></body></html>"""
"""Answer to a browser that asks for a page which is not there; the views of the page follow a # and are no addresses of the server."""


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
        return Response(NOT_FOUND, 404, media_type=TYPES[".html"])
    return _refusal(error.status_code, "NotFound" if error.status_code == 404 else "Refused", str(error.detail))


async def _problem(request: Request, error: Exception) -> Response:
    missing = isinstance(error, ConfigError) and error.field in ("run", "RUN", "EPISODE", "GROUP", "STEP", "TASK", "ROW")
    status = 404 if missing else 400 if isinstance(error, ConfigError) else 500
    return _refusal(status, type(error).__name__, str(error))


def _refusal(status: int, kind: str, text: str) -> Response:
    return Response(to_json({"error": text, "type": kind}), status, media_type="application/json")
