"""The meaning of each setting, from the docstrings of the schema: ``--help`` of the commands, and words for the reference page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from agentrl.config import algorithm, learner, lora, reward, schema
from agentrl.config.sections import flag

MAIN = (
    *("agent", "prompts", "model", "num_steps", "asynchronous", "advantage_estimator", "learning_rate", "groups_per_step"),
    *("n_samples_per_prompt", "max_new_tokens", "max_turns", "dynamic_filtering", "eval_every", "save_every", "resume", "run_dir"),
)
"""Settings that most runs name; ``--help`` shows them first."""

COLUMN = 27
MAX_WIDTH = 120


def help_text(config: Any, prog: str, intro: str, topic: str = "") -> str:
    """Return what ``--help`` prints of a default configuration: the main settings, or as `topic` those of a section or ``all``."""
    docs = setting_docs()
    homes = {item.name: section for section in dataclasses.fields(config) for item in dataclasses.fields(getattr(config, section.name))}
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    sections = [section.name for section in dataclasses.fields(config)]
    if topic:
        return "\n".join(_section(getattr(config, name), name, docs, width) for name in (sections if topic == "all" else [topic]))
    lines = [f"usage: {prog} [FILE] [--flag VALUE ...]", "", *textwrap.wrap(intro, width), "", "Main settings", ""]
    for name in MAIN:
        section = getattr(config, homes[name].name)
        lines += _entry(type(section), name, getattr(section, name), docs[type(section).__name__][name], width, short=True)
    lines += ["", "More", ""]
    for name in sections:
        lines += _row(f"--help {name}", _sentence(inspect.getdoc(type(getattr(config, name))) or ""), width)
    lines += _row("--help all", "every setting", width)
    lines += _row("--config FILE", "settings from a TOML, YAML or JSON file; flags come after it", width)
    lines += _row("--dry-run", "print the resolved configuration and stop", width)
    return "\n".join([*lines, ""])


def _section(section: Any, name: str, docs: Mapping[str, Mapping[str, str]], width: int) -> str:
    kind = type(section)
    lines = [f"{name}: {_plain(inspect.getdoc(kind) or '')}", ""]
    for item in dataclasses.fields(kind):
        lines += _entry(kind, item.name, getattr(section, item.name), docs[kind.__name__][item.name], width, short=False)
    return "\n".join([*lines, ""])


def _entry(kind: type[Any], name: str, default: object, doc: str, width: int, *, short: bool) -> list[str]:
    hint = get_type_hints(kind, include_extras=True)[name]
    word = flag(name)
    label = word if bare(hint) is bool else f"{word} {_placeholder(hint)}"
    text = _sentence(doc) if short else _plain(doc)
    shown = default_text(default).strip("`")
    if not short and (accepted := _plain(values(hint))) not in ("text", "on or off", "path", "texts"):
        text += f" ({accepted})"
    return _row(label, text if shown in ("unset", "off") else f"{text.rstrip('.')} [{shown}]", width)


def _placeholder(hint: Any) -> str:
    hint, _ = _unwrap(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _placeholder(next(part for part in get_args(hint) if part is not type(None)))
    if get_origin(hint) is Literal:
        return "NAME"
    if get_origin(hint) is tuple:
        return "TEXT ..." if get_args(hint)[-1] is Ellipsis else " ".join("X" for _ in get_args(hint))
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}[hint]


def _row(label: str, text: str, width: int) -> list[str]:
    first = f"  {label}".ljust(COLUMN)
    if len(first) > COLUMN:
        return [first, *textwrap.wrap(text, width, initial_indent=" " * COLUMN, subsequent_indent=" " * COLUMN)]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * COLUMN)


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def _sentence(text: str) -> str:
    """The first sentence or clause of a description."""
    return _plain(text).split(". ")[0].split(";")[0].rstrip(".")


def setting_docs() -> dict[str, dict[str, str]]:
    """Return section class -> setting -> its description, for every section."""
    modules = (schema, learner, algorithm, lora, reward)
    return {name: docs for module in modules for name, docs in field_docs(inspect.getsource(module)).items()}


def field_docs(source: str) -> dict[str, dict[str, str]]:
    """Return class name -> field name -> the text under the field, from the source of dataclasses."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = {}
            for pair in pairwise(node.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[node.name][name] = text
    return docs


def values(hint: Any) -> str:
    """Return what a field of type `hint` accepts, in words."""
    hint, limits = _unwrap(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return "texts" if args[-1] is Ellipsis else f"{len(args)} numbers"
    if origin in (Union, types.UnionType):
        return " or ".join(values(part) for part in args if part is not type(None))
    return (NAMES[hint] + _range(limits)).strip()


NAMES: dict[Any, str] = {bool: "on or off", int: "integer", float: "number", str: "text", Path: "path"}


def _unwrap(hint: Any) -> tuple[Any, list[Any]]:
    limits: list[Any] = []
    while get_origin(hint) is Annotated:
        limits += hint.__metadata__
        hint = hint.__origin__
    return hint, limits


def bare(hint: Any) -> Any:
    """Return a type without its limits."""
    return _unwrap(hint)[0]


def _range(limits: Iterable[Any]) -> str:
    kinds = ((Ge, "from", "ge"), (Gt, "above", "gt"), (Le, "to", "le"), (Lt, "below", "lt"))
    return "".join(f" {word} {getattr(limit, name)}" for limit in limits for kind, word, name in kinds if isinstance(limit, kind))


def default_text(value: object) -> str:
    """Return a default as it would be typed, or what stands for it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == "" or value == ():
        return "unset"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"
