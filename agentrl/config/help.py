"""The meaning of each setting, from the docstrings of the schema: ``--help`` of the commands, and words for the reference page."""

from __future__ import annotations

import inspect
import shutil
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from agentrl.config.sections import Setting, bare, flag, notes_of, sections_of, settings_of

COLUMN = 27
MAX_WIDTH = 120


def help_text(command: type[Any], prog: str, intro: str, *, main: Sequence[str] = (), topic: str = "") -> str:
    """Return what ``--help`` prints of a command: its main settings, or as `topic` those of a section or ``all``.

    Args:
        command: Dataclass whose fields are sections.
        prog: The words that call the command.
        intro: What it does.
        main: Settings to show first; empty: all of them are shown.
        topic: Name of a section, or ``all``.
    """
    table, sections = settings_of(command), sections_of(command)
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    if topic or not main:
        shown = (topic,) if topic not in ("", "all") else tuple(sections)
        heading = [] if topic else [_usage(prog), "", *textwrap.wrap(intro, width), ""]
        return "\n".join([*heading, *(_section(name, sections[name], table, width) for name in shown)])
    lines = [_usage(prog), "", *textwrap.wrap(intro, width), "", "Main settings", ""]
    lines += [line for name in main for line in _entry(table[name], width, short=True)]
    lines += ["", "More", ""]
    for name, kind in sections.items():
        lines += _row(f"--help {name}", _sentence(inspect.getdoc(kind) or ""), width)
    lines += _row("--help all", "every setting", width)
    lines += _row("--config FILE", "settings from a TOML, YAML or JSON file", width)
    lines += _row("--dry-run", "print the resolved configuration and stop", width)
    return "\n".join([*lines, ""])


def _usage(prog: str) -> str:
    return f"usage: {prog} [FILE] [--flag VALUE ...]"


def _section(name: str, kind: type[Any], table: Mapping[str, Setting], width: int) -> str:
    about = inspect.getdoc(kind) or ""
    lines = [name if about.startswith(f"{kind.__name__}(") else f"{name}: {_plain(about)}", ""]  # a dataclass makes one of its fields
    for setting in table.values():
        if setting.section == name:
            lines += _entry(setting, width, short=False)
    return "\n".join([*lines, ""])


def _entry(setting: Setting, width: int, *, short: bool) -> list[str]:
    word = flag(setting.name)
    label = word if bare(setting.hint) is bool else f"{word} {_placeholder(setting.hint)}"
    text = _sentence(setting.doc) if short else _plain(setting.doc)
    shown = default_text(setting.default).strip("`")
    if not short and (accepted := _plain(values(setting.hint))) not in ("text", "on or off", "path", "texts"):
        text += f" ({accepted})"
    return _row(label, text if shown in ("unset", "off") else f"{text.rstrip('.')} [{shown}]", width)


def _placeholder(hint: Any) -> str:
    hint = bare(hint)
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


def values(hint: Any) -> str:
    """Return what a field of type `hint` accepts, in words."""
    limits, hint = [*notes_of(hint)], bare(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return "texts" if args[-1] is Ellipsis else f"{len(args)} numbers"
    if origin in (Union, types.UnionType):
        return " or ".join(values(part) for part in args if part is not type(None))
    return (NAMES[hint] + _range(limits)).strip()


NAMES: dict[Any, str] = {bool: "on or off", int: "integer", float: "number", str: "text", Path: "path"}


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
