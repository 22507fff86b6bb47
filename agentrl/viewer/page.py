"""The viewer's page as one HTML file that opens from disk: all modules, styles and answers lie in it, and it asks nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.track.jsonl import encode

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
