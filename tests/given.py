"""Settings of a training run as Python code gives them, checked; nothing is looked at beyond them and the model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.api.settings import read_settings
from agentrl.config.load import Loaded
from agentrl.config.schema import TrainConfig
from agentrl.resolve.plan import checked_steps


def train_settings(env: object, given: Mapping[str, Any]) -> TrainConfig:
    """Return the settings after the rules; see `agentrl.settings`."""
    return checked_steps(read_settings(env, given)).settings


def checked(settings: TrainConfig) -> TrainConfig:
    """Return settings of which nobody gave one, after the rules."""
    return checked_steps(Loaded(settings=settings, sources={}, saved={})).settings
