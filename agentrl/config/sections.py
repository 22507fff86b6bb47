"""Sections of settings: one table of what their fields say, read by the loader, the help, the docs and the rules of resumption.

A section is a dataclass; a command is a dataclass whose fields are sections. Everything that is true of a setting stands in its field:
its range, other names and `ResumeMayChange` in the annotation, its meaning in the docstring under it.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from agentrl.core.settings import Alias, ResumeMayChange, default_of

Sections = TypeVar("Sections")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a command, as its field states it.

    Attributes:
        name: Name of the field.
        section: Name of the section in the command.
        kind: Class of the section.
        hint: Type with everything that annotates it.
        default: Value where nothing is said.
        doc: The docstring under the field.
    """

    name: str
    section: str
    kind: type[Any]
    hint: Any
    default: Any
    doc: str

    @property
    def notes(self) -> tuple[Any, ...]:
        """Everything that annotates the type."""
        return tuple(notes_of(self.hint))

    def aliases(self, command: str) -> tuple[str, ...]:
        """Return the further flags that a command has for it."""
        return tuple(name for note in self.notes if isinstance(note, Alias) and note.command in ("", command) for name in note.flags)

    def is_default(self, value: Any) -> bool:
        """Return True for the default, also as JSON has it."""
        return bool(value == self.default or value == json.loads(json.dumps(self.default, default=str)))

    @property
    def takes_none(self) -> bool:
        """True if it may be unset."""
        return type(None) in get_args(bare(self.hint))

    @property
    def may_change(self) -> bool:
        """True if a resumed run may have it otherwise."""
        return ResumeMayChange in self.notes


def settings_of(command: type[Any]) -> Mapping[str, Setting]:
    """Return the settings of a command by name, section after section.

    Raises:
        TypeError: If two sections have a setting of the same name.
    """
    key: Any = command  # mypy takes a type for something that cannot be hashed
    return _settings_of(key)


@cache
def _settings_of(command: Any) -> Mapping[str, Setting]:
    found: dict[str, Setting] = {}
    for section, kind in sections_of(command).items():
        hints, docs = get_type_hints(kind, include_extras=True), section_docs(kind)
        for item in fields(kind):
            if get_origin(bare(hints[item.name])) is Mapping:  # what a section holds for its readers, no setting
                continue
            if item.name in found:
                raise TypeError(f"{command.__name__} has the setting {item.name} twice: in {found[item.name].section} and {section}")
            found[item.name] = Setting(
                name=item.name, section=section, kind=kind, hint=hints[item.name], default=default_of(item), doc=docs.get(item.name, "")
            )
    return MappingProxyType(found)


def sections_of(command: type[Any]) -> Mapping[str, type[Any]]:
    """Return the sections of a command: name -> class."""
    hints = get_type_hints(command)
    return MappingProxyType({item.name: hints[item.name] for item in fields(command) if is_dataclass(hints[item.name])})


def section_docs(kind: type[Any]) -> Mapping[str, str]:
    """Return field -> the text under it, of a section and of what it extends."""
    docs: dict[str, str] = {}
    # Bases first, so that a field which a section declares again has the section's own text.
    for part in reversed(kind.__mro__):
        if is_dataclass(part):
            docs |= _module_docs(part.__module__).get(part.__name__, {})
    return docs


@cache
def _module_docs(module: str) -> Mapping[str, Mapping[str, str]]:
    return field_docs(inspect.getsource(sys.modules[module]))


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


def notes_of(hint: Any) -> Iterator[Any]:
    """Yield everything that annotates a type, and the parts of a union."""
    if get_origin(hint) is Annotated:
        yield from notes_of(hint.__origin__)
        yield from hint.__metadata__
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from notes_of(part)


def bare(hint: Any) -> Any:
    """Return a type without what annotates it."""
    while get_origin(hint) is Annotated:
        hint = hint.__origin__
    return hint


def changed(config: Sections, **values: Any) -> Sections:
    """Return `config` with settings replaced, each named as in its section.

    Args:
        config: A dataclass with sections of the schema as fields.
        values: New values by field name, unchecked.

    Raises:
        TypeError: If no section has a field of that name.
    """
    sections: dict[str, Any] = {item.name: getattr(config, item.name) for item in fields(config)}  # type: ignore[arg-type]
    homes = {item.name: name for name, section in sections.items() if is_dataclass(section) for item in fields(section)}
    sections |= {name: values.pop(name) for name in list(values) if name in sections and name not in homes}
    if unknown := {name: values.pop(name) for name in list(values) if name not in homes}:
        holder = next((name for name, section in sections.items() if hasattr(section, "with_options")), None)
        if holder is None:
            raise TypeError(f"no section of {type(config).__name__} has a setting named {', '.join(sorted(unknown))}")
        sections[holder] = sections[holder].with_options(**unknown)
    for name, value in values.items():
        sections[homes[name]] = replace(sections[homes[name]], **{name: value})
    return replace(config, **sections)  # type: ignore[type-var]
