"""The words of a command line as values of settings: one parser, and so one form of errors, for every command."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from agentrl.config.sections import Setting, bare
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.core.settings import flag

_UNFIT = re.compile(r"-|\+{0,2}[\w.]+=")
"""Beginnings of words that are no names: of short flags, and of settings as other systems write them, `actor.lr=1e-6`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A setting that a word without a flag sets, as RUN in ``agentrl inspect RUN``.

    Attributes:
        setting: Name of the setting.
        label: Name of the word in help and messages.
        required: The command does not run without it.
        has_flag: The setting may be given by its flag as well.
        doc: Meaning of the word; empty: the text of the setting.
    """

    setting: str
    label: str
    required: bool = False
    has_flag: bool = True
    doc: str = ""


ENVIRONMENT = Word(setting="agent", label="ENV", doc="The environment, the same as --agent ENV.")


def usage(prog: str, words: Sequence[Word], table: Mapping[str, Setting]) -> str:
    """Return the form of a command's call, without its flags."""
    return " ".join([prog, *(_shown(word, _repeats(table[word.setting].hint)) for word in words)])


def _shown(word: Word, several: bool) -> str:
    label = word.label + " ..." * several
    return label if word.required else f"[{label}]"


def flags_of(table: Mapping[str, Setting], words: Sequence[Word] = ()) -> dict[str, tuple[Setting, bool]]:
    """Return every flag with its setting; the second value is False for one that switches its setting off."""
    hidden = {word.setting for word in words if not word.has_flag}
    shown = [setting for name, setting in table.items() if name not in hidden]
    on = {flag(setting.name): (setting, True) for setting in shown}
    off = {f"--no-{flag(setting.name)[2:]}": (setting, False) for setting in shown if bare(setting.hint) is bool}
    # A flag that is a setting's own name goes before the same word that would switch another setting off.
    return off | on


def parse(args: Sequence[str], prog: str, table: Mapping[str, Setting], words: Sequence[Word] = ()) -> dict[str, Any]:
    """Return the values that the words of a command line give, by the names of the settings; their types are checked later.

    Args:
        args: The words, whose flags are all known.
        prog: The words that call the command, for messages.
        table: Settings of the command.
        words: Settings that words without flags set, in this order; the last may be of several words.

    Raises:
        ConfigError: If a value or a required word is missing, or a word is left over.
    """
    values: dict[str, Any] = {}
    loose: list[str] = []
    for _, setting, value in _tokens(args, flags_of(table, words)):
        if setting is None:
            loose.append(value)
        elif _repeats(setting.hint):
            values[setting.name] = (*values.get(setting.name, ()), *value)
        else:
            values[setting.name] = value
    values |= _without_flags(loose, prog, table, [word for word in words if word.setting not in values])
    for word in words:
        if word.required and not values.get(word.setting):
            raise ConfigError(word.label, None, "is not given", f"Write `{usage(prog, words, table)}`.")
    return values


def others(args: Sequence[str], table: Mapping[str, Setting]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that belong to the settings of `table`, and the other words."""
    own: list[str] = []
    rest: list[str] = []
    for taken, setting, _ in _tokens(args, flags_of(table)):
        (own if setting is not None else rest).extend(taken)
    return own, rest


def _tokens(args: Sequence[str], flags: Mapping[str, tuple[Setting, bool]]) -> Iterator[tuple[list[str], Setting | None, Any]]:
    """Yield the words that belong together, their setting and its value; the setting of a word without a flag is `None`."""
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        if name not in flags:
            yield [word], None, word
            continue
        setting, on = flags[name]
        if bare(setting.hint) is bool:
            yield [word], setting, (text if equals else on)
            continue
        following = _parts(setting, text) if equals else rest[: _length(name, setting, rest)]
        rest = rest if equals else rest[len(following) :]
        yield [word, *([] if equals else following)], setting, _value(setting, following)


def _repeats(hint: Any) -> bool:
    """Return True for a setting of any number of values."""
    hint = bare(hint)
    return get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis


def _length(name: str, setting: Setting, rest: Sequence[str]) -> int:
    """The number of words that follow a flag as its values."""
    hint = _tuple_of(setting.hint)
    free = next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))
    if _repeats(hint):
        return free
    unset = rest[:1] == ["None"] and bare(setting.hint) is not hint
    wanted = len(get_args(hint)) if get_origin(hint) is tuple and not unset else 1
    if free < wanted:
        problem = "has no value" if wanted == 1 else f"needs {wanted} values"
        raise ConfigError(name, " ".join(rest[:free]) or None, problem, f"Write {' '.join([name, *['VALUE'] * wanted])}.")
    return wanted


def _parts(setting: Setting, text: str) -> list[str]:
    """Return the values after an equals sign, of which a setting of several may have more than one."""
    return text.split() if get_origin(_tuple_of(setting.hint)) is tuple and not _repeats(setting.hint) else [text]


def _tuple_of(hint: Any) -> Any:
    """Return a type without what annotates it, and of one that may be unset what else it is, if that is a tuple."""
    hint = bare(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return next((part for part in parts if get_origin(part) is tuple), hint)


def _value(setting: Setting, texts: Sequence[str]) -> Any:
    hint = _tuple_of(setting.hint)
    if _repeats(hint):
        return tuple(_typed(text, get_args(hint)[0]) for text in texts)
    if get_origin(hint) is tuple:
        return None if texts == ["None"] else tuple(map(_typed, texts, get_args(hint)))
    return _typed(texts[0], hint)


def _typed(text: str, hint: Any) -> Any:
    """A word as the choice that it names, or as it is: a wrong text is refused where ranges are checked."""
    hint = bare(hint)
    if get_origin(hint) in (Union, UnionType):
        if text == "None" and type(None) in get_args(hint):
            return None
        # A part of a union that does not fit gives back the very text.
        return next((value for part in get_args(hint) if (value := _typed(text, part)) is not text), text)
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == text), text)
    if hint in (int, float):
        with contextlib.suppress(ValueError):
            return hint(text)
    return text


def choices(hint: Any) -> list[str]:
    """Return the names that a setting of a choice takes; of another setting none."""
    hint = bare(hint)
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [name for part in get_args(hint) for name in choices(part)] if get_origin(hint) in (Union, UnionType) else []


def _meant(word: str, prog: str) -> str:
    if word.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "what is on or off takes no value: write --name or --no-name"
    return f"`{prog} --help` shows the form"


def _without_flags(loose: Sequence[str], prog: str, table: Mapping[str, Setting], words: Sequence[Word]) -> dict[str, Any]:
    """The values of the settings that words without flags set."""
    values: dict[str, Any] = {}
    rest = list(loose)
    for word in words:
        if rest and not _UNFIT.match(rest[0]):
            several = _repeats(table[word.setting].hint)
            values[word.setting] = tuple(rest) if several else rest[0]
            rest = [] if several else rest[1:]
    if rest:
        raise UnknownFlagError(prog, tuple((word, f"belongs to no flag; {_meant(word, prog)}") for word in rest))
    return values
