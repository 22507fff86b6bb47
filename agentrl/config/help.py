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

from agentrl.config.sections import Setting, bare, notes_of, sections_of, settings_of
from agentrl.config.words import Word, usage
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.settings import flag

COLUMN = 27
MAX_WIDTH = 120


ALSO = {
    "--config": ("--config FILE", "settings from a TOML, YAML or JSON file"),
    "--dry-run": ("--dry-run", "print the resolved configuration and stop"),
    ACCEPT: (ACCEPT, "resume with inputs that changed"),
}
"""Flags of commands that are no settings: how help writes them, and their meaning."""


def help_text(
    settings: type[Any],
    prog: str,
    intro: str,
    *,
    words: Sequence[Word] = (),
    main: Sequence[str] = (),
    also: Sequence[str] = (),
    topic: str = "",
) -> str:
    """Return what ``--help`` prints of a command: its main settings, or as `topic` those of a section or ``all``.

    Args:
        settings: Dataclass whose fields are sections.
        prog: The words that call the command.
        intro: What it does.
        words: Settings that words without flags set.
        main: Settings to show first; empty: all of them are shown.
        also: Names in `ALSO` of the flags that the command has beside its settings.
        topic: Name of a section, or ``all``.
    """
    table, sections = settings_of(settings), sections_of(settings)
    width = screen_width()
    hidden = {word.setting for word in words if not word.has_flag}
    listed = {name: setting for name, setting in table.items() if name not in hidden}
    whole = [_section(name, kind, listed, width, intro) for name, kind in sections.items() if topic in ("", "all", name)]
    if topic:
        return "\n".join(line for section in whole for line in section)
    lines = [f"usage: {usage(prog, words, table)} [--flag VALUE ...]", "", *textwrap.wrap(_plain(intro), width), ""]
    for word in words:
        lines += _word(word, table[word.setting], width)
    lines += [""] * bool(words)
    more = [ALSO[name] for name in also]
    if main:
        lines += ["Main settings", "", *(line for name in main for line in _entry(table[name], width, short=True)), ""]
        of_sections = [(f"--help {name}", _sentence(inspect.getdoc(kind) or "")) for name, kind in sections.items()]
        more = [*of_sections, ("--help all", "every setting"), *more]
    else:
        lines += [line for section in whole for line in section]
    lines += ["More", "", *(line for row in more for line in table_row(*row, width)), ""] if more else []
    return "\n".join(lines)


def screen_width() -> int:
    """Return the width of help: that of the terminal, but never so wide that a line is hard to read."""
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def _section(name: str, kind: type[Any], table: Mapping[str, Setting], width: int, intro: str) -> list[str]:
    """The lines of a section; the only one of a command has the command's own text, and no heading."""
    about = inspect.getdoc(kind) or ""
    heading = name if about.startswith(f"{kind.__name__}(") else f"{name}: {_plain(about)}"  # a dataclass makes a text of its fields
    lines = [] if about == intro else [*textwrap.wrap(heading, width), ""]
    return [*lines, *(line for setting in table.values() if setting.section == name for line in _entry(setting, width, short=False)), ""]


def _word(word: Word, setting: Setting, width: int) -> list[str]:
    shown = default_text(setting.default).strip("`")
    text = _plain(word.doc or setting.doc)
    return table_row(word.label, text if word.required or word.doc or shown == "unset" else f"{text.rstrip('.')} [{shown}]", width)


def _entry(setting: Setting, width: int, *, short: bool) -> list[str]:
    word = flag(setting.name)
    label = word if bare(setting.hint) is bool else f"{word} {_placeholder(setting.hint)}"
    text = _sentence(setting.doc) if short else _plain(setting.doc)
    shown = default_text(setting.default).strip("`")
    if shown == "on" and not short:
        shown = f"on; off with --no-{word[2:]}"
    if not short and (accepted := _plain(values(setting.hint))) not in ("text", "on or off", "path", "texts"):
        text += f" ({accepted})"
    return table_row(label, text if shown in ("unset", "off") else f"{text.rstrip('.')} [{shown}]", width)


def _placeholder(hint: Any) -> str:
    hint = bare(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _placeholder(next(part for part in get_args(hint) if part is not type(None)))
    if get_origin(hint) is Literal:
        return "NAME"
    if get_origin(hint) is tuple:
        return " ".join("..." if part is Ellipsis else _placeholder(part) for part in get_args(hint))
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}[hint]


def table_row(label: str, text: str, width: int) -> list[str]:
    """Return the lines of one entry: its label, and the text beside it, or under a long label."""
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
