"""Settings that may name a function or class of a user's file, ``file.py:name``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from agentrl.config.schema import TrainConfig
from agentrl.core.plugins import is_plugin, resolve_plugin

PLUGIN_FIELDS: tuple[tuple[str, str], ...] = (
    ("algo", "advantage_estimator"),
    ("algo", "policy_loss"),
    ("flow", "group_filter"),
    ("track", "callback"),
)
"""Section and field of each such setting; its value is text or a tuple of texts, and may be a built-in name instead."""


def resolve_plugins(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the absolute path of every plug-in's file, so that each process finds it.

    Raises:
        ConfigError: If a file is not there.
    """
    for section, field in PLUGIN_FIELDS:
        part = getattr(config, section)
        value = getattr(part, field)
        resolved = tuple(_resolved(field, item) for item in value) if isinstance(value, tuple) else _resolved(field, value)
        if resolved != value:
            config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{field: resolved})})
    return config


def _resolved(field: str, value: str) -> str:
    return resolve_plugin(flag_of(field), value) if is_plugin(value) else value


def plugins(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield the flag and the value of each plug-in of the configuration."""
    for section, field in PLUGIN_FIELDS:
        value = getattr(getattr(config, section), field)
        for item in value if isinstance(value, tuple) else (value,):
            if is_plugin(item):
                yield flag_of(field), item


def flag_of(field: str) -> str:
    """Return the command-line form of a field name."""
    return "--" + field.replace("_", "-")
