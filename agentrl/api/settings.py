"""Settings given in Python: the names of the flags, and the same checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.evaluate import EvaluateConfig, SampleConfig
from agentrl.config.load import Loaded, load_given, read_given
from agentrl.config.mapping import refuse_hidden
from agentrl.config.schema import TrainConfig
from agentrl.env.given import specify
from agentrl.resolve.commands import EVAL, SAMPLE, TRAIN, run_settings
from agentrl.resolve.saved import AUTO, saved_settings
from agentrl.track.callbacks import CallbackLike, check_callback


def environment(env: object) -> str:
    """Return the specification of what was given as environment: a text or path as it is, any other object as one that this process has."""
    return os.fspath(env) if isinstance(env, str | os.PathLike) else specify(env)


def with_environment(env: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the environment among them; an empty one is left to the file or the run that the settings begin with."""
    return dict(given) if env == "" else {"agent": environment(env), **given}


def read_settings(env: object, given: Mapping[str, Any]) -> Loaded[TrainConfig]:
    """Read the settings of a training run; an empty `env` is that of the run that is resumed, or of the file ``config``.

    Raises:
        ConfigError: If one of them is unknown, or its value is out of range.
    """
    resume = os.fspath(given.get("resume", ""))
    path = saved_settings(resume) if "config" not in given and resume not in ("", AUTO) else None
    loaded = read_given(TRAIN, with_environment(env, given), path)
    refuse_hidden(loaded.settings)
    return loaded


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


def eval_settings(env: object, given: Mapping[str, Any]) -> EvaluateConfig:
    """Return the checked settings of an evaluation; see `read_settings`."""
    given, path = _with_run(given)
    config: EvaluateConfig = load_given(EVAL, with_environment(env, given), path)
    return config


def sample_settings(env: object, given: Mapping[str, Any]) -> SampleConfig:
    """Return the checked settings of a data set to sample; see `read_settings`."""
    given, path = _with_run(given)
    config: SampleConfig = load_given(SAMPLE, with_environment(env, given), path)
    return config


def _with_run(given: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The settings with the directory of a run in the place of a `Run`, and the file with its settings."""
    run = getattr(given.get("run"), "path", given.get("run"))
    return {**given, **({} if run is None else {"run": run})}, run_settings(run)
