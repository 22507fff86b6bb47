"""Settings given in Python: the names of the flags, and the same checks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentrl.api.resume import AUTO, saved_settings
from agentrl.config.load import aliases, field_error, from_mapping, given_names, read_file, suggest
from agentrl.config.model_defaults import with_defaults
from agentrl.config.rules import check
from agentrl.config.sample import SampleConfig
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.env.given import specify
from agentrl.evaluation.config import SAME_HERE, Request, base_settings, make_request
from agentrl.evaluation.sample_config import make_sample, sample_default
from agentrl.track.callbacks import CallbackLike, check_callback

S = TypeVar("S")


def environment(env: object) -> str:
    """Return the specification of what was given as environment: a text or path as it is, any other object as one that this process has."""
    return os.fspath(env) if isinstance(env, str | os.PathLike) else specify(env)


def train_settings(env: object, given: Mapping[str, Any]) -> TrainConfig:
    """Return the checked configuration of a training run; an empty `env` is that of the run that is resumed, or of the file ``config``.

    Raises:
        ConfigError: If one of them is wrong.
    """
    given, path = _without_config(given)
    resume = str(_plain(given.get("resume", "")))
    if path is None and resume not in ("", AUTO):
        path = saved_settings(resume)
    data = read_file(path) if path is not None else {}
    config = with_settings(from_mapping(data, source=str(path)), _with_agent(env, given), command="train")
    return check(with_defaults(config, given_names((), data) | {name for key in given for name in _fields(key, {})}))


def own_callbacks(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[CallbackLike]]:
    """Return the settings with the callbacks that are named by a file, and the callbacks that are classes or objects.

    Raises:
        ConfigError: If one of these cannot be a callback.
    """
    value = given.get("callback", ())
    listed = list(value) if isinstance(value, list | tuple) else [value]
    own = [item for item in listed if not isinstance(item, str)]
    for item in own:
        check_callback(item, repr(item))
    named = {"callback": tuple(item for item in listed if isinstance(item, str))} if "callback" in given else {}
    return {**given, **named}, own


def eval_request(env: object, given: Mapping[str, Any]) -> Request:
    """Return the checked request of an evaluation; see `train_settings`.

    Raises:
        ConfigError: If a setting is wrong.
    """
    given, path = _without_config(given)
    run = getattr(given.get("run"), "path", given.get("run"))
    given = {**given, "run": run} if run is not None else given
    base, default = base_settings(None if run is None else str(run), path)
    names = {flag.removeprefix("--").replace("-", "_"): other.removeprefix("--").replace("-", "_") for flag, other in SAME_HERE.items()}
    return make_request(with_settings(default, _with_agent(env, given), command="eval", names=names, without=("algo",)), base)


def sample_settings(env: object, given: Mapping[str, Any]) -> SampleConfig:
    """Return the checked settings of a data set to sample; see `train_settings`.

    Raises:
        ConfigError: If a setting is wrong.
    """
    given, path = _without_config(given)
    run = getattr(given.get("run"), "path", given.get("run"))
    given = {**given, "run": run} if run is not None else given
    default = sample_default(None if run is None else str(run), path)
    return make_sample(with_settings(default, _with_agent(env, given), command="sample", without=("algo", "eval")))


def _without_config(given: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    rest = dict(given)
    path = rest.pop("config", None)
    return rest, None if path is None else Path(path)


def _with_agent(env: object, given: Mapping[str, Any]) -> dict[str, Any]:
    return dict(given) if env == "" else {"agent": environment(env), **given}


def with_settings(
    default: S, given: Mapping[str, Any], *, command: str, names: Mapping[str, str] | None = None, without: Container[str] = ()
) -> S:
    """Return settings with some of them changed, types and ranges checked.

    Args:
        default: A dataclass of settings, or of sections that hold them.
        given: Name in the form of Python, or alias, -> value.
        command: The command that has the same settings, for messages.
        names: Further names -> fields.
        without: Sections that are not for users to set.

    Raises:
        ConfigError: If a name is unknown (the nearest one is named), is given twice, or a value is wrong.
    """
    values = dataclasses.asdict(default)  # type: ignore[call-overload]
    homes = {name: section for section, part in values.items() if section not in without and _is_section(default, section) for name in part}
    homes |= {name: "" for name in values if not _is_section(default, name)}
    seen: dict[str, str] = {}
    for key, value in given.items():
        for name in _fields(key, names or {}):
            if name not in homes:
                known = ["async_" if field == "asynchronous" else field for field in homes]
                raise ConfigError(key, value, "is not a setting", _of_command(suggest(key, known), command))
            if name in seen:
                raise ConfigError(key, value, f"is given twice, also as {seen[name]}", "Keep one of the two.")
            seen[name] = key
            (values[homes[name]] if homes[name] else values)[name] = _plain(value)
    schema: Any = type(default)
    try:
        checked: S = _adapter(schema).validate_python(values)
    except ValidationError as error:
        raise field_error(error, command) from None
    return checked


def _of_command(remedy: str, command: str) -> str:
    return remedy if command == "train" else remedy.replace("agentrl train --help all", f"agentrl {command} --help")


def _is_section(default: object, name: str) -> bool:
    return dataclasses.is_dataclass(getattr(default, name))


def _fields(key: str, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the fields that a name stands for."""
    for flag in aliases().get("--" + key.replace("_", "-"), (key,)):
        name = flag.removeprefix("--").replace("-", "_").rstrip("_")
        name = names.get(name, name)
        yield "asynchronous" if name == "async" else name


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)
