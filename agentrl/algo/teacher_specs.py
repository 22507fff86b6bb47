"""Forms of ``--teacher``: a model on the learner ranks, or one that is served beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from agentrl.core.errors import ConfigError
from agentrl.core.paths import absolute_names

FLAG = "--teacher"
FORMS = "Write MODEL, self, engine:MODEL, http://HOST:PORT/v1#model=NAME, or several of the last two by task: NAME=FORM,NAME=FORM."
SELF = "self"
OPTIONS = ("model", "api_key_env", "tokenizer")
ENGINE = "engine:"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec:
    """One teacher: the tasks that it is for, where it runs, and its directory, hub name or address."""

    name: str = ""  # tasks of this name are its; empty: all
    kind: Literal["learner", "self", "engine", "endpoint"]
    where: str
    options: dict[str, str] = field(default_factory=dict)  # of an endpoint

    @property
    def tokenizer(self) -> str:
        """Directory or hub name with its tokenizer; empty for an endpoint that is to be asked."""
        return self.where if self.kind != "endpoint" else self.options.get("tokenizer", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingSettings:
    """Settings of served teachers."""

    specs: tuple[TeacherSpec, ...]
    top_k: int  # most likely tokens of the teacher that are wanted with each sampled token
    by: str = ""  # key of a task's metadata with the name of its teacher; empty: ``teacher``, ``kind`` or ``source``
    timeout_s: float = 60.0  # for the scores of one episode


def teacher_specs(text: str) -> tuple[TeacherSpec, ...]:
    """Return what ``--teacher`` says; nothing if it is empty.

    Raises:
        ConfigError: If it has another form, or names two teachers for the same tasks.
    """
    specs = tuple(_read(part.strip()) for part in text.split(",") if part.strip())
    names = [spec.name for spec in specs]
    if len(specs) > 1 and (not all(names) or len({*names}) < len(names)):
        raise ConfigError(FLAG, text, "does not say which tasks each teacher is for", "Give each a name of its own: NAME=engine:MODEL.")
    return specs


def learner_teacher(text: str) -> str:
    """Return the model that every learner rank is to load; empty if none is."""
    return next((spec.where for spec in teacher_specs(text) if spec.kind == "learner"), "")


def served_teachers(text: str) -> tuple[TeacherSpec, ...]:
    """Return the teachers that are served."""
    return tuple(spec for spec in teacher_specs(text) if spec.kind in ("engine", "endpoint"))


def with_absolute_folders(text: str) -> str:
    """Return ``--teacher`` with absolute paths of directories."""
    parts = [part.strip() for part in text.split(",")]
    return ",".join(part if "://" in part else _absolute(part) for part in parts)


def _absolute(part: str) -> str:
    head, mark, model = part.rpartition(ENGINE)
    return f"{head}{mark}{absolute_names(model)}"


def _read(part: str) -> TeacherSpec:
    name, where = "", part
    head, equals, tail = part.partition("=")
    # The fragment of an address has an equals sign too, but what stands before that is no identifier.
    if equals and tail.startswith((ENGINE, "http://", "https://")) and head.isidentifier():
        name, where = head, tail
    if where == SELF:
        return TeacherSpec(kind="self", where="")
    if where.startswith(ENGINE):
        return TeacherSpec(name=name, kind="engine", where=_folder(where.removeprefix(ENGINE), part))
    if not where.startswith(("http://", "https://")):
        return TeacherSpec(name=name, kind="learner", where=_folder(where, part))
    address, _, fragment = where.partition("#")
    options = dict(parse_qsl(fragment))
    if not urlsplit(address).hostname or set(options) - {*OPTIONS} or "model" not in options:
        raise ConfigError(FLAG, part, "is not the address of a service with the name of its model", FORMS)
    return TeacherSpec(name=name, kind="endpoint", where=address.rstrip("/"), options=options)


def _folder(model: str, text: str) -> str:
    if not model:
        raise ConfigError(FLAG, text, "names no model", FORMS)
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(FLAG, text, "is not a directory", "Give a Hugging Face directory or hub name.")
    return str(Path(model).expanduser()) if model.startswith("~") else model


def teacher_of(names: Sequence[str], wanted: str) -> int | None:
    """Return the index of the teacher for tasks of a name; `None` if none is. One teacher without a name is for all."""
    if list(names) == [""]:
        return 0
    return names.index(wanted) if wanted in names else None
